"""Tests that master weights in two halves train, save and load like separate float32 master weights."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import ALONE, nano, sample_keys, tokens
from tests.support.parity import run_chain, saved_tensors, worst_difference
from tests.support.runs import losses, train
from trainkit.config.training import OptimizerConfig
from trainkit.plan.keep import KeepRule
from trainkit.run.manifest import Checkpoint
from trainkit.run.rundir import RunDir
from trainkit.trainer.checkpoint.loader import load_tensors, read_initial_weights
from trainkit.trainer.checkpoint.saver import CheckpointSaver, SaveRequest
from trainkit.trainer.checkpoint.state import StateTensors
from trainkit.trainer.checkpoint.storage import _float32_shapes
from trainkit.trainer.models.model import weights_of
from trainkit.trainer.optimizers.adamw import ShardedAdamW
from trainkit.trainer.optimizers.by_element import PIECE_ELEMENTS
from trainkit.trainer.precision import cast_weights
from trainkit.trainer.split_master import SplitMaster, join, master_of, split, split_weights

CONFIG = OptimizerConfig(weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
EIGHT_BIT = CONFIG.model_copy(update={"name": "adamw_8bit"})
BF16_AVERAGES = CONFIG.model_copy(update={"state_dtype": "bf16"})
CONFIGS = pytest.mark.parametrize("config", [CONFIG, EIGHT_BIT, BF16_AVERAGES], ids=["fp32", "8bit", "bf16"])
ONE, ZERO = torch.ones(()), torch.zeros(())
EDGES = (0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x7F7E, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF)
"""Upper halves at which the number of digits changes: zero, subnormal, one, the largest, infinity and NaN."""


def float32_of(upper: Tensor) -> Tensor:
    """Return all 2**16 float32 numbers of each upper half."""
    return ((upper.int()[:, None] << 16) | torch.arange(1 << 16, dtype=torch.int32)).view(torch.float32)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def test_all_low_halves():
    """A number is changed only halfway between two bf16 values, if it is rounded down, and by one unit."""
    generator = torch.Generator().manual_seed(7)
    sample = torch.randint(0, 1 << 15, (32,), generator=generator)
    upper = torch.cat([sample, torch.tensor(EDGES)])
    for masters in (float32_of(upper), float32_of(upper | 0x8000)):
        upper_half, lower_half = split(masters)
        joined, weight = join(upper_half, lower_half), upper_half.view(torch.bfloat16)
        is_nan = masters.isnan()
        assert joined[is_nan].isnan().all()
        assert weight[is_nan].isnan().all()
        assert torch.equal(bits(weight)[~is_nan], bits(masters.bfloat16())[~is_nan])
        assert torch.equal(bits(joined.bfloat16())[~is_nan], bits(weight)[~is_nan])
        is_tie = (bits(masters) & 0x1FFFF) == 0x08000
        moved = (bits(masters) - bits(joined))[~is_nan]
        assert torch.equal(moved, is_tie[~is_nan].int())
        for old, new in zip((upper_half, lower_half), split(joined), strict=True):
            assert torch.equal(old[~is_nan], new[~is_nan])


def optimizer_of(
    model: nn.Module, config: OptimizerConfig, *, splits: bool = True, **options: bool
) -> ShardedAdamW:
    lowers = split_weights(model) if splits else {}
    masters = cast_weights(model, torch.bfloat16)
    assert len(masters) == (0 if splits else len([*model.parameters()]))
    return ShardedAdamW(weights_of([model], masters, lowers), config, **options)


def values(optimizer: ShardedAdamW) -> dict[str, Tensor]:
    """Return a copy of the float32 weights and of the optimizer state."""
    found = {weight.name: master_of(weight) for weight in optimizer._weights}
    joined = {name: item.join() if isinstance(item, SplitMaster) else item for name, item in found.items()}
    return copy.deepcopy({**joined, **dict(optimizer.state_tensors())})


def step(model: nn.Module, optimizer: ShardedAdamW, number: int, skip: Tensor = ZERO) -> float:
    """Train one step of two passes; return the loss."""
    total = 0.0
    for seed in (2 * number, 2 * number + 1):
        loss = model(tokens(seed=seed), sample_keys()).float().square().mean()
        loss.backward()
        total += loss.item()
    optimizer.collect_gradients()
    assert {param.grad.dtype for param in optimizer._locals} == {torch.float32}
    optimizer.step(1e-3, torch.tensor(1.5), skip)
    optimizer.zero_grad()
    return total


@CONFIGS
def test_trains_like_a_float32_master(config, monkeypatch):
    """Losses and averages are equal, and few weights differ, by the units of the ties that were moved."""
    monkeypatch.setitem(PIECE_ELEMENTS, "cpu", 1000)
    mine, theirs = nano(tie_embeddings=True), nano(tie_embeddings=True)
    optimizer, expected = optimizer_of(mine, config), optimizer_of(theirs, config, splits=False)
    largest: dict[str, Tensor] = {}
    for number in range(8):
        assert step(mine, optimizer, number) == step(theirs, expected, number)
        found, wanted = values(optimizer), values(expected)
        sizes = {name: value.abs() for name, value in wanted.items() if name.endswith("weight")}
        largest = {name: size.maximum(largest.get(name, size)) for name, size in sizes.items()}
    # A weight that approaches zero keeps the differences from the time when its unit was larger.
    units = {
        name: (found[name] - wanted[name]).abs() / (size.nextafter(size + 1) - size)
        for name, size in largest.items()
    }
    assert max(float(each.max()) for each in units.values()) <= 4
    assert 0 < sum(int(each.count_nonzero()) for each in units.values()) < 20  # of 119,104 weights
    assert all(torch.equal(found[name], wanted[name]) for name in wanted.keys() - units.keys())
    for mine_now, theirs_now in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert mine_now.dtype == torch.bfloat16
        assert torch.equal(mine_now, theirs_now)


@CONFIGS
def test_skip_leaves_both_halves(config):
    model = nano()
    optimizer = optimizer_of(model, config)
    step(model, optimizer, 0)
    halves = copy.deepcopy([master.halves for master in optimizer._split.values()])
    before = values(optimizer)
    step(model, optimizer, 1, skip=ONE)
    for old, master in zip(halves, optimizer._split.values(), strict=True):
        assert all(torch.equal(*pair) for pair in zip(old, master.halves, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in values(optimizer).items())


@pytest.mark.slow(seconds=5)
@CONFIGS
def test_a_compiled_update_is_the_same(config, monkeypatch):
    """Small weights of float32 averages are updated together by torch's kernel, as without `compiled`."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr("trainkit.trainer.optimizers.by_element.COMPILED_DEVICES", ("cpu",))
    monkeypatch.setattr("trainkit.trainer.optimizers.by_element.WHOLE_ELEMENTS", 5000)
    models = [nano(num_layers=1) for _ in range(2)]
    eager, compiled = (optimizer_of(model, config, compiled=model is models[1]) for model in models)
    for number in range(4):
        skip = ONE if number == 2 else ZERO
        before = copy.deepcopy([master.halves for master in compiled._split.values()])
        for model, optimizer in zip(models, (eager, compiled), strict=True):
            step(model, optimizer, number, skip)
        for old, master in zip(before, compiled._split.values(), strict=True):
            is_equal = [torch.equal(*pair) for pair in zip(old, master.halves, strict=True)]
            assert all(is_equal) == (number == 2)
    for name, value in values(eager).items():
        if name.endswith("weight"):
            # Between two values of a code, or of bf16, the last bit decides.
            found = values(compiled)[name]
            assert ((found - value).abs() > 2e-5 + 1e-3 * value.abs()).float().mean() < 2e-3, name


def test_a_weight_that_is_not_contiguous():
    """Convolutions may have weights whose channels are last; the averages have the same strides."""
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Conv2d(8, 16, 3).to(memory_format=memory_format)
        optimizer = ShardedAdamW(weights_of([_Named(model)], lowers=split_weights(model)), CONFIG)
        assert model.weight.is_contiguous() == (memory_format == torch.contiguous_format)
        start = values(optimizer)
        for _ in range(3):
            model(torch.ones(1, 8, 5, 5, dtype=torch.bfloat16)).float().square().sum().backward()
            optimizer.collect_gradients()
            optimizer.step(1e-2, ONE, ZERO)
            optimizer.zero_grad()
        results.append(values(optimizer))
        assert all((results[-1][name] - value).abs().max() > 5e-3 for name, value in start.items())
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-2, atol=1e-3, msg=name)


@CONFIGS
def test_a_transposed_weight_is_updated_as_a_whole(config, monkeypatch):
    """The fused kernel ignores strides, and the rows of such a weight do not lie one after another."""
    results = []
    for limit in (1 << 18, 1000):
        monkeypatch.setitem(PIECE_ELEMENTS, "cpu", limit)
        torch.manual_seed(0)
        model = nn.ParameterDict({"w": nn.Parameter(torch.randn(64, 128).t())})
        optimizer = ShardedAdamW(weights_of([_Named(model)], lowers=split_weights(model)), config)
        (torch.randn(16, 128).bfloat16() @ model["w"]).float().square().mean().backward()
        optimizer.collect_gradients()
        optimizer.step(1e-2, ONE, ZERO)
        results.append(values(optimizer))
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_another_default_dtype_does_not_round():
    """A task may leave a default dtype behind, and a checkpoint has float32 regardless."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.randn(8, 8))})
    weights = weights_of([_Named(model)], lowers=split_weights(model))
    item = master_of(weights[0])
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        shapes = _float32_shapes({"w": item})[1]
    finally:
        torch.set_default_dtype(before)
    assert shapes["w"].dtype == torch.float32


class _Named:
    """Gives a module the names that `weights_of` asks a model for."""

    def __init__(self, module: nn.Module) -> None:
        self.named_parameters, self.canonical = module.named_parameters, str
        self.projections = frozenset[str]()


def test_what_is_not_split():
    """Only float32 weights are split, and a norm in `keep` stays in float32. Ties stay ties."""
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4)})
    model.b.weight = model.a.weight
    model.a.bias = nn.Parameter(model.a.bias.detach().double())
    model.b.bias.requires_grad_(False)
    lowers = split_weights(model, keep=(nn.BatchNorm1d,))
    assert {*lowers} == {model.a.weight, model.b.bias}
    assert model.b.weight is model.a.weight
    assert not model.b.bias.requires_grad
    assert model.norm.weight.dtype == torch.float32
    assert cast_weights(model, torch.bfloat16, keep=(nn.BatchNorm1d,)).keys() == {model.a.bias}


def test_initial_weights_are_read_in_float32():
    model = nano()
    weights = weights_of([model], lowers=split_weights(model), is_read=True)
    expected = dict(nano(seed=1).named_parameters())
    read_initial_weights(weights, {}, lambda name, index: expected[name][tuple(index)], resumed=False)
    for weight in weights:
        found, value = master_of(weight), expected[weight.name].detach()
        assert isinstance(found, SplitMaster)
        torch.testing.assert_close(found.join(), value, rtol=2**-23, atol=0)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_checkpoint_has_float32(tmp_path, blocking):
    """The checkpoint equals one of separate master weights, and loads into both kinds of weights."""
    mine, theirs = nano(), nano()
    optimizer, other = optimizer_of(mine, CONFIG), optimizer_of(theirs, CONFIG, splits=False)
    step(mine, optimizer, 0)
    state = StateTensors(optimizer._weights, optimizer)
    expected = values(optimizer)
    saver = CheckpointSaver(RunDir(tmp_path / "run").attempt(1), ALONE, state.tensors, KeepRule(last=9))
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    saver.allocate_buffers()
    saver.save(SaveRequest(1, {}, is_best=False, reason="test"), blocking=blocking)
    saver.wait_until_staged()
    for master in optimizer._split.values():
        master.weight.zero_()  # the file has the values of the call
        master.lower.zero_()
    saver.finish()
    saver.require_saved(1)
    assert {tensor.dtype for tensor in saved_tensors(tmp_path / "run").values()} == {torch.float32}
    checkpoint = Checkpoint(RunDir(tmp_path / "run").checkpoint_dir(1), 1)
    for loaded in (optimizer, other):
        target = StateTensors(loaded._weights, loaded)
        load_tensors(checkpoint, target.tensors, ALONE)
        target.copy_duplicates()
        assert all(torch.equal(value, expected[name]) for name, value in values(loaded).items())
    for param, cast in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(param, cast)
    saver.close()


BF16 = ("precision.dtype=bf16", "model.dropout=0.1")


@pytest.mark.slow(seconds=20)
def test_a_chain_of_layouts(tmp_path):
    """Shards of `fully_shard` have float32 master weights, and replicas on CPUs have split ones."""
    links = [(1, {}), (2, {"dp_shard": 2}), (1, {}), (2, {"dp_replicate": 2})]
    run_chain(tmp_path, links, BF16)
    assert worst_difference(tmp_path / "chain", tmp_path / "alone") < 1e-2


@pytest.mark.slow(seconds=20)
@pytest.mark.parametrize("num_procs", [1, 2])
def test_resumes_bit_for_bit(tmp_path, num_procs):
    options = [*BF16, f"parallel.dp_replicate={num_procs}", "train.steps=6"]
    train(tmp_path / "whole", options, num_procs)
    train(tmp_path / "cut", [*options, "train.stop_at_step=3"], num_procs, expect=75)
    train(tmp_path / "cut", options, num_procs)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    found, expected = saved_tensors(tmp_path / "cut"), saved_tensors(tmp_path / "whole")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert {found[name].dtype for name in found if name.startswith("model.")} == {torch.float32}
