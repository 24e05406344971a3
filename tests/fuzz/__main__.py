"""Try any number of random situations: `python tests/fuzz 2000 --seed 0`."""

import argparse
import collections
import sys

import torch
from rich.progress import track
from situations import examine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, help="how many situations")
    parser.add_argument("--seed", type=int, default=0, help="the first one's seed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    outcomes = collections.Counter[str]()
    for seed in track(range(options.seed, options.seed + options.count), "situations"):
        verdict = examine(seed)
        outcomes[verdict.outcome] += 1
        if verdict.outcome in ("failure", "near tie"):
            print(verdict, file=sys.stderr, flush=True)
    for outcome, number in outcomes.most_common():
        print(f"{number:6} {outcome}")
    return int(outcomes["failure"] > 0 or outcomes["near tie"] > 2 + options.count // 100)


if __name__ == "__main__":
    sys.exit(main())
