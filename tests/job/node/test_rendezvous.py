import socket

from trainkit.job.node.rendezvous import candidate_ports, choose_port, ephemeral_range, is_free


def test_candidates_are_outside_the_ephemeral_range_and_differ_by_job_and_attempt():
    first = candidate_ports("local-1", 1, (32768, 60999))
    assert len(set(first)) == 64
    assert all(10_000 <= port < 32768 or 60999 < port < 65_000 for port in first)
    assert first == candidate_ports("local-1", 1, (32768, 60999))
    assert first[0] != candidate_ports("local-1", 2, (32768, 60999))[0]
    assert first[0] != candidate_ports("local-2", 1, (32768, 60999))[0]


def test_no_candidates_when_everything_is_ephemeral():
    assert candidate_ports("local-1", 1, (1024, 65535)) == []


def test_ephemeral_range_of_a_file(tmp_path):
    (tmp_path / "range").write_text("20000\t30000\n")
    assert ephemeral_range(str(tmp_path / "range")) == (20000, 30000)
    assert ephemeral_range(str(tmp_path / "missing")) == (32768, 60999)


def test_taken_port_is_passed_over():
    wanted = choose_port("local-1", 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", wanted))
        taken.listen()
        assert not is_free(wanted)
        assert choose_port("local-1", 1) != wanted
