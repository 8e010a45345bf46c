"""Compares the decoder with a second one that follows the papers as simply as possible."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support.models import ALONE, SEQ_LEN, nano, nano_shape, nll_sum, sample_keys, tokens
from trainkit.plan.launch import Layout
from trainkit.plan.model_shape import PRESETS, num_params
from trainkit.plan.step_work import loss_chunks
from trainkit.trainer.build import recompute_and_compile
from trainkit.trainer.causal_lm import IGNORE_LABEL, Microbatch
from trainkit.trainer.forward_backward import ForwardContext, SequentialForwardBackward, _ChunkedLoss
from trainkit.trainer.models.decoder import MASK_BLOCK, Decoder, block_mask, dense_mask, document_index
from trainkit.trainer.parallel.context import repeat_kv_heads
from trainkit.trainer.progress import Progress


def naive_logits(model: Decoder, token_ids: Tensor) -> Tensor:
    """Compute one sample in float64, by head and position. token_ids [T] -> logits [T, vocab]."""
    shape = model.shape
    weights = {name: value.double() for name, value in model.state_dict().items()}
    head_dim = shape.dim // shape.num_heads
    length = len(token_ids)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + shape.norm_eps) * weights[f"{name}.weight"]

    def turn(x: Tensor, position: int) -> Tensor:
        turned = torch.empty_like(x)
        for pair in range(head_dim // 2):
            angle = position * shape.rope_theta ** (-2 * pair / head_dim)
            a, b = x[pair], x[pair + head_dim // 2]
            turned[pair] = a * math.cos(angle) - b * math.sin(angle)
            turned[pair + head_dim // 2] = b * math.cos(angle) + a * math.sin(angle)
        return turned

    x = weights["embedding.weight"][token_ids]
    for layer in range(shape.num_layers):
        prefix = f"blocks.{layer}"
        h = norm(x, f"{prefix}.attention_norm")
        q, k, v = (h @ weights[f"{prefix}.attention.{name}.weight"].T for name in ("wq", "wk", "wv"))
        heads = []
        for head in range(shape.num_heads):
            kv_head = head // (shape.num_heads // shape.num_kv_heads)
            mine = slice(head * head_dim, (head + 1) * head_dim)
            shared = slice(kv_head * head_dim, (kv_head + 1) * head_dim)
            outputs = []
            for position in range(length):
                query = turn(q[position, mine], position)
                scores = torch.stack(
                    [query @ turn(k[before, shared], before) for before in range(position + 1)]
                )
                attention = torch.softmax(scores / math.sqrt(head_dim), dim=0)
                outputs.append(attention @ v[: position + 1, shared])
            heads.append(torch.stack(outputs))
        x = x + torch.cat(heads, dim=-1) @ weights[f"{prefix}.attention.wo.weight"].T
        h = norm(x, f"{prefix}.ffn_norm")
        gate, up = (h @ weights[f"{prefix}.ffn.{name}.weight"].T for name in ("gate", "up"))
        x = x + (gate * torch.sigmoid(gate) * up) @ weights[f"{prefix}.ffn.down.weight"].T
    return norm(x, "norm") @ weights["head.weight"].T


@pytest.mark.parametrize(
    "config",
    [
        {"num_heads": 4, "num_kv_heads": 4},
        {"num_heads": 4, "num_kv_heads": 2, "tie_embeddings": True},
        {"num_heads": 2, "num_kv_heads": 1, "rope_theta": 500.0, "norm_eps": 1e-2},
    ],
)
def test_equals_the_naive_decoder(config):
    model = nano(**config).eval()
    with torch.no_grad():
        for param in model.parameters():
            # the weights are far enough from zero for attention that is not flat
            param.mul_(4.0 if param.dim() > 1 else 1.3)
        found = model(tokens(), sample_keys())
    assert found.shape == (2, SEQ_LEN, model.shape.vocab_size)
    for row, sample in zip(found, tokens(), strict=True):
        expected = naive_logits(model, sample)
        assert expected.std() > 0.1
        torch.testing.assert_close(row.double(), expected, rtol=1e-4, atol=1e-4)


def test_samples_do_not_see_each_other():
    model = nano(dropout=0.2).train()
    together = model(tokens(), sample_keys())
    torch.testing.assert_close(together[1:], model(tokens()[1:], sample_keys()[1:]))


def test_dropout_only_in_training():
    model, plain = nano(dropout=0.2), nano()
    assert torch.equal(model.eval()(tokens(), sample_keys()), plain(tokens(), sample_keys()))
    first = model.train()(tokens(), sample_keys())
    assert not torch.equal(first, plain(tokens(), sample_keys()))
    assert torch.equal(first, model(tokens(), sample_keys())), "a function of the sample, not of the call"
    assert not torch.equal(first, model(tokens(), sample_keys() + 1))


def test_each_dropout_of_the_model_has_its_own_mask():
    model = nano(num_layers=3)
    assert model.site_keys.unique().numel() == 7


@pytest.mark.parametrize("preset", [*PRESETS])
@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_parameters_are_as_many_as_the_plan_says(preset, tie_embeddings):
    shape = nano_shape(preset=preset, tie_embeddings=tie_embeddings)
    with torch.device("meta"):
        model = Decoder(shape, SEQ_LEN)
    assert sum(param.numel() for param in model.parameters()) == num_params(shape)


def test_first_values():
    model = nano(num_layers=8)
    for name, param in model.named_parameters():
        if param.dim() == 1:
            assert torch.equal(param, torch.ones_like(param))
            continue
        wanted = 0.02 / 4 if name.endswith(("wo.weight", "down.weight")) else 0.02
        assert param.std().item() == pytest.approx(wanted, rel=0.05), name
    loss = torch.nn.functional.cross_entropy(model(tokens(), sample_keys()).flatten(0, 1), tokens().flatten())
    assert loss.item() == pytest.approx(math.log(model.shape.vocab_size), abs=0.1), "knows nothing yet"


@pytest.mark.parametrize("mode", ["pointwise", "selective", "full"])
def test_recomputation_changes_no_bit(mode):
    """The packed samples need a document mask, and the recomputed dropout masks must be the same."""
    found = []
    for used in ("none", mode):
        model = masked(dropout=0.1, num_layers=2).to(torch.bfloat16).train()
        recompute_and_compile(list(model.blocks), used, compiled=False)  # type: ignore[arg-type]
        logits = model(tokens(4) % (EOS + 1), sample_keys(4))
        logits.float().square().mean().backward()
        found.append((logits, [param.grad for param in model.parameters()]))
    (logits, gradients), (again, of_again) = found
    assert torch.equal(logits, again)
    assert all(map(torch.equal, gradients, of_again))


@pytest.mark.parametrize("mode", ["pointwise", "selective", "full"])
def test_recomputing_keeps_less(mode):
    def kept_bytes(used: str) -> int:
        sizes = {}

        def pack(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        model = nano(num_layers=4)
        recompute_and_compile(list(model.blocks), used, compiled=False)  # type: ignore[arg-type]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            alive = model(tokens(8), sample_keys(8))
        assert alive.requires_grad
        return sum(sizes.values())

    assert kept_bytes(mode) < 0.7 * kept_bytes("none")


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize(
    ("dropout", "mode"), [(0.0, "none"), (0.1, "pointwise"), (0.1, "selective"), (0.1, "full")]
)
def test_all_blocks_share_one_compiled_graph(dropout, mode, monkeypatch):
    """torch recompiles one function at most 8 times. test_layouts.py trains with the code of Inductor."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    model, compiled = (nano(num_layers=9, dropout=dropout) for _ in range(2))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    recompute_and_compile(list(compiled.blocks), mode, compiled=True)  # type: ignore[arg-type]
    found, expected = compiled(tokens(), sample_keys()), model(tokens(), sample_keys())
    torch.testing.assert_close(found, expected)
    for logits in (found, expected):
        logits.float().square().mean().backward()
    gradients = [[param.grad for param in one.parameters()] for one in (compiled, model)]
    torch.testing.assert_close(*gradients)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    with torch.no_grad():  # as in a validation
        found, expected = (one.eval()(tokens(), sample_keys()) for one in (compiled, model))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("chunks", "is_tied"), [(2, False), (5, True)])
def test_a_loss_in_parts_is_the_whole_loss(chunks, is_tied):
    labels = tokens(seed=1)
    labels[0, 3:9] = IGNORE_LABEL
    micros = [Microbatch(tokens(seed=seed), labels, sample_keys()) for seed in (2, 3)]
    found = []
    for number in (1, chunks):
        model = nano(tie_embeddings=is_tied)
        seen: list[tuple[int, bool]] = []

        def counted(logits: Tensor, labels: Tensor, seen: list[tuple[int, bool]] = seen) -> Tensor:
            seen.append((logits.shape[1], logits.requires_grad))
            return nll_sum(logits, labels)

        context = ForwardContext(ALONE, counted, use_loss_parallel=False)
        passes = SequentialForwardBackward(lambda enabled: None, Progress(), model, context, number)
        losses: list[Tensor] = []
        passes.accumulate_gradient(micros, torch.tensor(0.25), losses.append)
        num_trained = len(seen)
        with torch.no_grad():
            losses.append(passes.loss_sums(micros[0]))
        sizes, has_gradient = zip(*seen, strict=True)
        assert all(has_gradient[:num_trained])
        assert not any(has_gradient[num_trained:]), "a validation computes gradients of the head"
        found.append((losses, {name: param.grad for name, param in model.named_parameters()}))
        assert max(sizes) == (SEQ_LEN if number == 1 else math.ceil(2 * SEQ_LEN / chunks))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


def test_the_gradients_of_the_parts_are_added_in_float32():
    torch.manual_seed(0)
    x, weight = torch.randn(64, 32).bfloat16(), torch.randn(128, 32).bfloat16()
    labels = torch.randint(0, 128, (64,))
    head = weight.clone().requires_grad_()
    _ChunkedLoss.apply(x, head, labels, nll_sum, 16).backward()
    summed = torch.zeros(weight.shape)
    for part, of_part in zip(x.chunk(16), labels.chunk(16), strict=True):
        logits = (part @ weight.T).requires_grad_()
        nll_sum(logits[None], of_part[None]).backward()
        summed += logits.grad.T.float() @ part.float()
    assert torch.equal(head.grad, summed.bfloat16())


def test_small_gradients_of_the_parts_survive_in_fp16():
    """The labels are almost certain, so without the loss scale most gradients would be below fp16's range."""
    micro, scale = Microbatch(tokens(), tokens(), sample_keys()), torch.tensor(2.0**14)
    found = []
    for dtype in (torch.float32, torch.float16):
        model = nano(tie_embeddings=True)
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(param.half())
                if "blocks" in name:
                    param.zero_()
            model.embedding.weight.mul_(24.0)
        model.to(dtype)
        context = ForwardContext(ALONE, nll_sum, use_loss_parallel=False)
        passes = SequentialForwardBackward(lambda enabled: None, Progress(), model, context, 4)
        passes.accumulate_gradient([micro], scale, lambda loss: None)
        found.append(model.norm.weight.grad.float() / scale)
    expected, halved = found
    torch.testing.assert_close(halved, expected, rtol=0.05, atol=float(expected.abs().max()) / 50)


def test_when_a_loss_is_split():
    shape = nano_shape(vocab_size=2**18)
    tokens = (127, 1024, 1025, 1026, 3066, 4096)
    assert [loss_chunks(Layout(), shape, number) for number in tokens] == [1, 1, 2, 2, 3, 4]
    assert loss_chunks(Layout(tp=2), shape, 4096) == loss_chunks(Layout(pp=2), shape, 4096) == 1
    wide = nano_shape(vocab_size=2**18, dim=4096, num_heads=32)
    assert [loss_chunks(Layout(), wide, tokens) for tokens in (8191, 8192)] == [1, 8]


EOS = 256


def masked(in_blocks: bool = False, **config: int) -> Decoder:
    model = nano(**config)
    model.eos_id = EOS
    if in_blocks:
        model.attend_in_blocks()
    return model


@pytest.mark.parametrize("lengths", [(1, 15), (5, 1, 1, 9), (16,)])
def test_packed_documents_have_the_logits_of_each_alone(lengths):
    """A document alone begins at position 0, because rotation depends only on distances of positions."""
    packed = tokens(2) % EOS
    ends = torch.tensor(lengths).cumsum(0)
    packed[0, ends[:-1] - 1] = EOS  # the other sample is one document
    found = masked()(packed, sample_keys())
    plain = nano()
    start = 0
    for end in ends.tolist():
        alone = plain(packed[:1, start:end], sample_keys(1))
        torch.testing.assert_close(found[:1, start:end], alone, rtol=1e-4, atol=1e-5)
        start = end
    torch.testing.assert_close(found[1:], plain(packed[1:], sample_keys(1)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [256, 300])
@pytest.mark.parametrize("window", [None, 50, 129])
@pytest.mark.parametrize("share", [0.0, 0.003, 0.02, 0.3, 1.0])
def test_blocks_of_documents(length, window, share):
    """The kernel's blocks (skipped, whole or masked) give the same result as the mask in memory."""
    generator = torch.Generator().manual_seed(length)
    packed = torch.where(torch.rand(3, length, generator=generator) < share, EOS, 0)
    packed[0] = 0
    packed[0, -2] = EOS  # a long document ends inside the last block, which may be incomplete
    documents, positions = document_index(packed, EOS), torch.arange(length)
    mask = block_mask(positions, window, documents)
    dense = dense_mask(positions, length, torch.float32, window, documents)[:, 0] == 0
    number, inside = (
        F.pad(cells, (0, -length % MASK_BLOCK) * 2)
        .unfold(1, MASK_BLOCK, MASK_BLOCK)
        .unfold(2, MASK_BLOCK, MASK_BLOCK)
        .sum((3, 4))
        for cells in (dense, torch.ones_like(dense))  # the last block may extend beyond the sample
    )
    for counts, indices, expected in (
        (mask.kv_num_blocks, mask.kv_indices, (number > 0) & (number < inside)),
        (mask.full_kv_num_blocks, mask.full_kv_indices, number == inside),
    ):
        rank = torch.arange(indices.shape[-1]).expand_as(indices)
        listed = torch.zeros_like(number).scatter_(
            -1, indices[:, 0].long(), (rank < counts[..., None])[:, 0].long()
        )
        assert torch.equal(listed.bool(), expected)
    at = [torch.arange(size) for size in (3, 1, length, length)]
    grid = torch.meshgrid(*at, indexing="ij")
    assert torch.equal(mask.mask_mod(*grid)[:, 0], dense)


def test_blocks_are_compiled_once_for_all_documents():
    """Each step has a different mask, which must not compile a block again."""
    model = masked(in_blocks=True)
    graphs = CompileCounterWithBackend("eager")
    for block in model.layers:
        block.forward = torch.compile(block.forward, backend=graphs, fullgraph=True)
    with torch.no_grad():
        found = [model(tokens(2, seed=seed) % (EOS + 1), sample_keys()) for seed in range(3)]
    assert graphs.frame_count == 1
    with torch.no_grad():
        expected = [masked()(tokens(2, seed=seed) % (EOS + 1), sample_keys()) for seed in range(3)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_repeated_kv_heads_keep_the_mask():
    packed = tokens() % EOS
    packed[:, 6] = EOS
    model = masked(num_heads=4, num_kv_heads=2)
    expected = model(packed, sample_keys())
    repeat_kv_heads(model.attentions)
    torch.testing.assert_close(model(packed, sample_keys()), expected)
