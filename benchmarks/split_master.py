"""Split and join master weights over many float32 numbers: every lower half of a sample of upper halves.

    python -m benchmarks.split_master [--numbers 2**28]

The exit code is 1 if an upper half is not the number rounded to bf16, or if a joined number differs by more
than a moved tie.
"""

from __future__ import annotations

import argparse
import sys

import torch

from trainkit.trainer.split_master import SPLIT_DTYPE, join, split

LOWER_HALVES = 1 << 16
AT_A_TIME = 64


def check(upper: torch.Tensor) -> tuple[int, int, int]:
    """Return the counts of finite numbers, moved numbers and wrong numbers with these upper halves."""
    masters = ((upper.int()[:, None] << 16) | torch.arange(LOWER_HALVES, dtype=torch.int32)).view(
        torch.float32
    )
    half, lower = split(masters)
    joined, is_number = join(half, lower), ~masters.isnan()
    moved = masters.view(torch.int32) - joined.view(torch.int32)
    is_tie = (masters.view(torch.int32) & 0x1FFFF) == 0x8000
    is_right = (half == masters.to(SPLIT_DTYPE).view(torch.int16)) & (moved == is_tie.int())
    is_right &= joined.to(SPLIT_DTYPE).view(torch.int16) == half
    is_nan = joined.isnan() & half.view(SPLIT_DTYPE).isnan()
    return (
        int(is_number.sum()),
        int(moved[is_number].count_nonzero()),
        int((~is_right.where(is_number, is_nan)).sum()),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numbers", type=int, default=1 << 28, help="at most 2**32, which are all")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(args.seed))
    counts = [check(upper) for upper in order[: args.numbers // LOWER_HALVES].split(AT_A_TIME)]
    numbers, moved, wrong = map(sum, zip(*counts, strict=True))
    print(f"{numbers:,} numbers that are not NaN: {moved:,} moved by one unit (ties), {wrong:,} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
