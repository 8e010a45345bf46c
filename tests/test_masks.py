"""Tests which values are masked in texts and command lines, and which similar ones are not."""

import shlex
import time

import pytest

from trainkit.formats import mask_secrets
from trainkit.launch.secrets import secret_options, without_secrets

KEY = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-DEF_123"

TEXTS = [
    # Signed URLs, and keys in a query, are masked.
    ("https://a.blob.core.windows.net/c/f?sv=2022&sp=r&sig=aB%2Fc1%3D", "aB%2Fc1%3D"),
    ("https://b.s3.amazonaws.com/k?X-Amz-Credential=me%2F1&X-Amz-Signature=0a1b2c3d", "me%2F1 0a1b2c3d"),
    ("https://b/k?X-Amz-Security-Token=FwoGZXIvYXdz%3D&x=1", "FwoGZXIvYXdz%3D"),
    ("https://storage.googleapis.com/b/o?X-Goog-Signature=9f8e7d", "9f8e7d"),
    ("https://b/k?Expires=1&Signature=abc%2B&Key-Pair-Id=K1", "abc%2B"),
    ("<a href='https://h/x?a=1&amp;sig=s3cr3t'>", "s3cr3t"),
    ('{"url": "https://h/x?a=1\\u0026sig=s3cr3t"}', "s3cr3t"),
    ("https://maps.example.org/x?key=0123456789abcdefghij&q=1", "0123456789abcdefghij"),
    ("https://h/x?access_token=abcdef&token=ghijkl", "abcdef ghijkl"),
    # Userinfo and connection strings are masked.
    ("git clone https://me:hunter2@h/x.git", "hunter2"),
    ("redis://:hunter2@h:6379/0", "hunter2"),
    ("postgresql+psycopg2://me:p:w@h/db", "p:w"),
    ("https://0123456789abcdef0123456789abcdef@o1.ingest.example.org/2", "0123456789abcdef0123456789abcdef"),
    ("jdbc:oracle:thin:scott/tiger@//h:1521/x", "tiger"),
    ("jdbc:mysql://h/db?user=me&password=hunter2", "hunter2"),
    ("Server=h;Uid=me;Pwd=hunter2;Encrypt=yes", "hunter2"),
    ("DefaultEndpointsProtocol=https;AccountName=a;AccountKey=aB/c1==;x=y", "aB/c1=="),
    ("Endpoint=sb://h/;SharedAccessKeyName=n;SharedAccessKey=aB/c1=", "aB/c1="),
    ("https://hooks.slack.com/services/T0/B0/xyz", "T0/B0/xyz"),
    ("https://discord.com/api/webhooks/123/a-b_c", "123/a-b_c"),
    ("https://api.telegram.org/bot123:AbC/send", "123:AbC/send"),
    # Headers are masked.
    ("Authorization: Basic bWU6aHVudGVyMg==", "bWU6aHVudGVyMg=="),
    ("authorization: Bearer hunter2hunter2", "hunter2hunter2"),
    ("Authorization: hunter2", "hunter2"),
    ("Proxy-Authorization: Negotiate YIIabc=", "YIIabc="),
    ('{"Authorization": "token abc123"}', "abc123"),
    ('Authorization: Digest username="me", response="0a1b"', 'username="me", response="0a1b"'),
    ("curl -H 'Authorization: AWS4-HMAC-SHA256 Credential=AKIAABCDEFGHIJKLMNOP/x'", "AKIAABCDEFGHIJKLMNOP"),
    ("X-Api-Key: hunter2", "hunter2"),
    ("PRIVATE-TOKEN: hunter2", "hunter2"),
    ("Cookie: session=abc; other=def", "session=abc; other=def"),
    # Keys are recognized by their form.
    (JWT, JWT),
    ("AKIAABCDEFGHIJKLMNOP, hf_abcdefgh12345678", "AKIAABCDEFGHIJKLMNOP hf_abcdefgh12345678"),
    (f"-----BEGIN OPENSSH PRIVATE KEY-----\n{KEY}\n-----END OPENSSH PRIVATE KEY-----\nmore", f"\n{KEY}\n"),
    (f"-----BEGIN PGP PRIVATE KEY BLOCK-----\nVersion: G (1)\n\n{KEY}\n", f"\nVersion: G (1)\n\n{KEY}\n"),
    (f'"private_key": "-----BEGIN PRIVATE KEY-----\\n{KEY}\\n-----END PRIVATE KEY-----"', f"\\n{KEY}\\n"),
    # Values are recognized by the names of their variables.
    ("DB_PASSWORD=hunter2 x", "hunter2"),
    ('{"db": {"passphrase": "hunter2"}}', "hunter2"),
    ('"{\\"password\\": \\"hunter2\\"}"', "hunter2"),
    ("<td>{&#34;api_key&#34;: &#34;hunter2&#34;}</td>", "hunter2"),
    ("AWS_SECRET_ACCESS_KEY=aB/c1", "aB/c1"),
    ('db_password = "hunter 2; x"  # y', "hunter 2; x"),
    ("X-Vault-Token: hunter2", "hunter2"),
    ("token: 0123456789abcdef", "0123456789abcdef"),
    # .netrc files are masked.
    ("machine api.wandb.ai login user password hunter2", "hunter2"),
    ("+machine h\n+  login me\n+  password hunter2\n", "hunter2"),
    ("machine h.org password hunter2 login me", "hunter2"),
    ("default login me password hunter2", "hunter2"),
]
"""Texts with the values in them that are masked."""

COMMANDS = [
    ("train.py --password hunter2 --lr 1", "hunter2"),
    ("train.py --db-password=hunter2", "hunter2"),
    ("train.py -password hunter2", "hunter2"),
    ("train.py --hf_token hunter2 --pass hunter2", "hunter2"),
    ("mysql -u root -phunter2 db", "hunter2"),
    ("mysqldump -proot db", "root"),
    ("mysqldump -p8080 db", "8080"),
    ("sshpass -p hunter2 ssh h", "hunter2"),
    ("sshpass -phunter2 ssh h", "hunter2"),
    ("docker login -u me -p hunter2 h.io", "hunter2"),
    ("7z x -phunter2 a.7z", "hunter2"),
    ("curl -u me:hunter2 https://h", "hunter2"),
    ("curl --user me:hunter2 https://h", "hunter2"),
    ("redis-cli -h h -a hunter2 ping", "hunter2"),
    ("ldapsearch -D cn=me -w hunter2", "hunter2"),
    ("unzip -P hunter2 a.zip", "hunter2"),
    ("smbclient //h/s -U me%hunter2", "hunter2"),
    ("openssl rsa -passin pass:hunter2", "hunter2"),
    ("program -pS3cr3tWord", "S3cr3tWord"),
    ("wget --http-password=hunter2 https://h", "hunter2"),
    ("curl -H 'X-Api-Key: hunter2' https://h", "hunter2"),
    ("env PGPASSWORD=hunter2 psql", "hunter2"),
    ("env SSHPASS=hunter2 MYSQL_PWD=hunter2 program", "hunter2"),
]
"""Command lines with the values in them that are masked."""

HARMLESS = [
    *("docker run -p 8080:80 image", "serve -p 8080", "serve --port 8080", "serve -p8080"),
    *("srun -p gpu -n 2 train", "srun -pgpu2 train", "srun -pa100-80gb", "sbatch -partition long"),
    *("ffmpeg -pix_fmt yuv420p", "gcc -pthread -pedantic -pipe", "train -pt model.pt -preset nano"),
    *("python -u train.py -p 0.5 -patience3", "train --password-file /x --use-token --max-tokens 4096"),
    *(
        "train --eos-token </s> --pad_token [PAD] --mask-token=<mask>",
        "tar -xpf a.tar",
        "mkdir -p /a/B1cdefgh",
    ),
    *("train --pass 2 --num-passes 3 --tokenizer bytes --keys 3", "ssh -p 2222 me@host", "cp -pR a b"),
    *(
        "kill: sig=15",
        "handler(sig=SIGTERM)",
        "tokens=4096 tokenizer: bytes",
        "eos_token=2",
        "loss_per_token: 2.31",
        "next-token: x",
    ),
    *(
        "https://h/x?sigma=1&key=name&page=2",
        "https://h/x?X-Amz-Date=20260101",
        "ssh://git@h/x",
        "http://h:80/x",
    ),
    *("authorization: required", "authorization: $TOKEN", "the password is wrong", "PWD=/home/me"),
    *("the machine has no login", "machine learning", "default: login", "bearer of news", "cookie cutter"),
    *("-----BEGIN CERTIFICATE-----", "eyJ", "loss 2.31 lr 3e-4", "--token $HF_TOKEN --password $PW"),
    *(
        "mysql -u root -p db",
        "curl -u me https://h",
        "curl -o f https://h",
        "head_dim=64 num_key_value_heads=8",
    ),
]
"""Texts and command lines without masked values."""


@pytest.mark.parametrize(("text", "secrets"), TEXTS)
def test_a_secret_in_a_text(text: str, secrets: str) -> None:
    expected = text
    for secret in [secrets] if secrets in text else secrets.split():
        expected = expected.replace(secret, "***")
    assert mask_secrets(text) == expected
    assert mask_secrets(expected) == expected


@pytest.mark.parametrize(("command", "secret"), COMMANDS)
def test_a_secret_in_a_command(command: str, secret: str) -> None:
    expected = shlex.split(command.replace(secret, "***"))
    assert without_secrets(shlex.split(command), ()) == expected
    assert without_secrets(["sh", "-c", command], ()) == ["sh", "-c", command.replace(secret, "***")]
    assert mask_secrets(command) == command.replace(secret, "***")


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret(text: str) -> None:
    assert mask_secrets(text) == text
    assert without_secrets(words := shlex.split(text.replace("<", r"\<")), ()) == words
    assert without_secrets(["sh", "-c", text], ()) == ["sh", "-c", text]
    assert list(secret_options(words)) == []


def test_a_warning_names_options_without_their_values() -> None:
    command = (
        "train https://me:hunter2222@h?x=1 --url=https://h?sig=hunter2222 -pHunter2222 --api-key hunter2222"
    )
    found = list(secret_options(shlex.split(command)))
    assert found == ["an argument", "--url", "an argument", "--api-key"]


def test_a_long_text_is_masked_in_time() -> None:
    line = (
        "step 100 loss 2.31 tokens_per_s 12345 path /home/me/a-b_c-d_e-f/g-h_i-j?x=1&y=2 --set a.b_c=1 " * 4
    )
    start = time.process_time()
    mask_secrets(f"{line}\n" * 300)
    mask_secrets("a_b-" * 5000)
    assert time.process_time() - start < 5
