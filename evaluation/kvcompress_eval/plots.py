"""Pictures of results; the only file that imports matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from torch import Tensor
from torch.nn import functional

from kvcompress_eval.comparison import UNCOMPRESSED
from kvcompress_eval.leak_command import Summary
from kvcompress_eval.long_prompts import Reading
from kvcompress_eval.needle import Needle
from kvcompress_eval.needle_grid import Found
from kvcompress_eval.plan import GIB, Plan
from kvcompress_eval.ratios import Ratio
from kvcompress_eval.scores import Panel
from kvcompress_eval.tune import Outcome, Quality, front
from kvcompress_eval.tune_command import Tuned

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # the backend must be chosen first


def plot_kept(runs: Sequence[tuple[str, Tensor]], needle: Needle, path: Path, title: str) -> None:
    """Which prompt positions every run kept: x position, y layer, colour share of KV heads."""
    figure, axes = plt.subplots(
        len(runs), 1, figsize=(11, 1.2 + 1.35 * len(runs)), sharex=True, layout="constrained"
    )
    image = None
    for axis, (label, kept) in zip(axes, runs, strict=True):
        layers, prompt = kept.shape
        image = axis.imshow(
            kept.numpy(),
            aspect="auto",
            interpolation="none",
            vmin=0,
            vmax=1,
            cmap="magma_r",
            extent=(0, prompt, layers - 0.5, -0.5),
        )
        axis.set_title(label, fontsize=9, loc="left")
        axis.set_ylabel("layer")
        axis.axvspan(needle.first, needle.last + 1, color="tab:cyan", alpha=0.35, lw=0)
        for edge in (needle.first, needle.last + 1):
            axis.axvline(edge, color="tab:blue", lw=0.8)
    axes[-1].set_xlabel("position in the prompt (tokens); the number is between the blue lines")
    figure.suptitle(title, fontsize=11)
    assert image is not None
    figure.colorbar(image, ax=list(axes), label="share of KV heads that kept it")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_needles(records: Sequence[Found], path: Path, title: str) -> None:
    """A heat map of every setting and kind: x length, y depth, colour share of seeds found."""
    kinds = list(dict.fromkeys(each.kind for each in records))
    settings = list(dict.fromkeys(each.setting for each in records))
    cells = [(kind, setting) for kind in kinds for setting in settings]
    across = min(3, len(cells))
    down = -(-len(cells) // across)
    figure, grid = plt.subplots(
        down, across, figsize=(4.2 * across, 0.8 + 2.7 * down), squeeze=False, layout="constrained"
    )
    image = None
    for axis, (kind, setting) in zip(grid.flat, cells, strict=False):
        group = [each for each in records if (each.kind, each.setting) == (kind, setting)]
        lengths = sorted({each.tokens for each in group})
        depths = sorted({each.depth for each in group})
        shares = torch.full((len(depths), len(lengths)), torch.nan)
        for row, depth in enumerate(depths):
            for column, tokens in enumerate(lengths):
                found = [e.found for e in group if (e.depth, e.tokens) == (depth, tokens)]
                if found:
                    shares[row, column] = sum(found) / len(found)
        image = axis.imshow(shares.numpy(), aspect="auto", vmin=0, vmax=1, cmap="RdYlGn")
        axis.set_xticks(range(len(lengths)), [str(length) for length in lengths])
        axis.set_yticks(range(len(depths)), [f"{depth:.2f}" for depth in depths], fontsize=7)
        axis.set_xlabel("length of the haystack (tokens)", fontsize=8)
        axis.set_ylabel("depth of the needle (0: start)", fontsize=8)
        name = setting.replace(", chunks", ",\nchunks")
        axis.set_title(f"{kind}: {name}" if len(kinds) > 1 else name, fontsize=7, loc="left")
    for axis in list(grid.flat)[len(cells) :]:
        axis.set_axis_off()
    figure.suptitle(title, fontsize=11)
    assert image is not None
    figure.colorbar(image, ax=grid, label="share of seeds that were answered")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_lengths(readings: Sequence[Reading], path: Path, title: str) -> None:
    """Memory and time over length, and the rows held while the shortest prompt is read."""
    figure, (memory, seconds, rows) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for how, style in (("chunks", "o-"), ("plain", "s--")):
        group = sorted((each for each in readings if each.how == how), key=lambda e: e.tokens)
        lengths = [each.tokens for each in group]
        memory.plot(lengths, [each.peak_mib for each in group], style, ms=4, label=how)
        seconds.plot(lengths, [each.seconds for each in group], style, ms=4, label=how)
    for axis, label in ((memory, "peak memory above the model (MiB)"), (seconds, "seconds")):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("prompt (tokens)")
        axis.set_ylabel(label)
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    shortest = min((each for each in readings if each.held), key=lambda each: each.tokens)
    seen, held = zip(*shortest.held, strict=True)
    rows.plot(seen, held, lw=0.8, label="chunks")
    rows.plot([0, shortest.tokens], [0, shortest.tokens], "--", lw=1, label="plain")
    rows.set_xlabel(f"tokens read, of {shortest.tokens}")
    rows.set_ylabel("rows that a layer holds after each forward")
    rows.legend(fontsize=8)
    rows.grid(alpha=0.3)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_observations(rates: Mapping[str, Tensor], share: float, path: Path, title: str) -> None:
    """Hit rates by layer: windows of the prompt, of the answer, questions, the question's place."""
    figure, grid = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    shown = rates["prompt windows"]
    image = grid[0, 0].imshow(shown.numpy(), aspect="auto", vmin=0, vmax=1, cmap="viridis")
    count = shown.shape[1]
    grid[0, 0].set_xticks(range(count), [str(number - count) for number in range(count)])
    grid[0, 0].set_xlabel("window of the prompt; -1 is its end")
    grid[0, 0].set_title("what each window shares with the answer", fontsize=9, loc="left")
    shown = rates["answer windows"]
    image = grid[0, 1].imshow(shown.numpy(), aspect="auto", vmin=0, vmax=1, cmap="viridis")
    grid[0, 1].set_xticks(range(shown.shape[1]), [str(each) for each in range(shown.shape[1])])
    grid[0, 1].set_xlabel("window of the answer")
    grid[0, 1].set_title("what the prompt's end shares with it", fontsize=9, loc="left")
    for axis in grid[0]:
        axis.set_ylabel("layer")
    figure.colorbar(image, ax=list(grid[0]), label="hit rate")
    questions = rates["questions"].mean(dim=0)
    image = grid[1, 0].imshow(questions.numpy(), vmin=0, vmax=1, cmap="viridis")
    names = [str(number + 1) for number in range(len(questions))]
    grid[1, 0].set_xticks(range(len(names)), names)
    grid[1, 0].set_yticks(range(len(names)), names)
    for row, values in enumerate(questions.tolist()):
        for column, value in enumerate(values):
            ink = "black" if value > 0.6 else "white"
            grid[1, 0].text(column, row, f"{value:.2f}", ha="center", va="center", color=ink)
    grid[1, 0].set_xlabel("question")
    grid[1, 0].set_ylabel("question")
    grid[1, 0].set_title("what two questions share of the document", fontsize=9, loc="left")
    figure.colorbar(image, ax=grid[1, 0], label="hit rate, mean of layers")
    for name in ("question last", "question first"):
        grid[1, 1].plot(rates[name].tolist(), "o-", ms=3, lw=1, label=name)
    grid[1, 1].axhline(share, color="black", ls="--", lw=1, label="by chance")
    grid[1, 1].set_ylim(0, 1)
    grid[1, 1].set_xlabel("layer")
    grid[1, 1].set_ylabel("hit rate")
    grid[1, 1].set_title("what the answer uses that the prompt's end found", fontsize=9, loc="left")
    grid[1, 1].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_losses(losses: Mapping[str, Tensor], tokens: int, path: Path, title: str) -> None:
    """Loss along a text: x position, y its mean over the last few hundred tokens."""
    figure, axis = plt.subplots(figsize=(9, 4), layout="constrained")
    width = max(1, tokens // 24)
    for label, every in losses.items():
        padded = functional.pad(every.cumsum(0), (1, 0))
        smooth = (padded[width:] - padded[:-width]) / width
        axis.plot(range(tokens - len(smooth), tokens), smooth.numpy(), label=label, lw=1.2)
    axis.set_xlabel("position in the text (tokens)")
    axis.set_ylabel(f"NLL, mean of {width} tokens (nats)")
    axis.legend(fontsize=8)
    axis.set_title(title, fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_comparison(
    panels: Sequence[Panel],
    path: Path,
    budget: str = "capacity (of a ratio or a composition: tokens held)",
    title: str = "",
) -> None:
    """Values against how much is kept, two panels a row; without eviction a dashed level.

    Args:
        panels: An even number.
        path: The picture.
        budget: What the x axis shows.
        title: Of all panels.
    """
    rows = (len(panels) + 1) // 2
    figure, grid = plt.subplots(
        rows, 2, figsize=(11, 1 + 2.8 * rows), squeeze=False, layout="constrained"
    )
    for axis, panel in zip(grid.flat, panels, strict=True):
        for curve in panel.curves:
            x, y, errors = zip(*curve.points, strict=True)
            bars = [error or 0.0 for error in errors]
            axis.errorbar(x, y, yerr=bars, label=curve.label, marker="o", ms=4, lw=1.2, capsize=2)
        if panel.level is not None:
            axis.axhline(panel.level, color="black", ls="--", lw=1, label="uncompressed")
        axis.set_title(panel.title, fontsize=9, loc="left")
        axis.set_xlabel(budget, fontsize=8)
        axis.set_ylabel(panel.value, fontsize=8)
        axis.legend(fontsize=7)
    if title:
        figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_leak(found: Sequence[Summary], path: Path, title: str) -> None:
    """Leakage, following and rows kept against what is evicted: a row for every policy and order.

    Args:
        found: Those without eviction are where every line begins.
        path: The picture.
        title: Of all of it.
    """
    colours = {"plain": "tab:red", "whitelist": "tab:blue", "fair": "tab:green"}
    rows = list(dict.fromkeys((e.policy, e.order) for e in found if e.policy != UNCOMPRESSED))
    headings = (
        "leakage: ROUGE-L recall of the directive",
        "instructions followed",
        "rows kept (solid: defence, dashed: directive)",
    )
    figure, grid = plt.subplots(
        len(rows),
        3,
        figsize=(13, 1.3 + 2.7 * len(rows)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for axes, (policy, order) in zip(grid, rows, strict=True):
        for mode, colour in colours.items():
            own = [each for each in found if (each.policy, each.mode) == (policy, mode)]
            start = [each for each in found if each.policy == UNCOMPRESSED]
            line = [each for each in (*start, *own) if each.order == order]
            line.sort(key=lambda each: each.evicted)
            x = [each.evicted for each in line]
            for axis, name in zip(axes, ("leakage", "following"), strict=False):
                y = [getattr(each, name) for each in line]
                values, errors = [each.value for each in y], [each.error for each in y]
                axis.errorbar(x, values, errors, color=colour, marker="o", ms=4, lw=1.3, capsize=2)
            for name, style in (("kept_defence", "o-"), ("kept_directive", "s--")):
                y = [getattr(each, name) for each in line]
                axes[2].plot(x, y, style, color=colour, ms=4, lw=1.3)
        axes[0].set_ylabel(f"{policy}\n{order}", fontsize=8)
        axes[2].plot([0, 1], [1, 0], color="gray", lw=0.8, ls=":")
    for axis, heading in zip(grid[0], headings, strict=True):
        axis.set_title(heading, fontsize=9, loc="left")
    for axis in grid.flat:
        axis.set_ylim(-0.03, 1.03)
        axis.set_xlim(-0.03, 1.0)
        axis.grid(alpha=0.3)
        axis.tick_params(labelbottom=True, labelsize=8)
    for axis in grid[-1]:
        axis.set_xlabel("share of the system prompt that is evicted", fontsize=8)
    handles = [
        Line2D([], [], color=colour, marker="o", ms=4, label=mode)
        for mode, colour in colours.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_plan(needs: Mapping[str, Sequence[tuple[int, float]]], plan: Plan, path: Path) -> None:
    """Memory against the length of the prompt, the card's size as a line.

    Args:
        needs: Of every cache, prompt tokens and the GiB that weights and cache need.
        plan: What they are part of.
        path: The picture.
    """
    figure, axis = plt.subplots(figsize=(8, 4.8), layout="constrained")
    for label, points in needs.items():
        x, y = zip(*points, strict=True)
        axis.plot(x, y, label=label, lw=1.4, color="black" if label == UNCOMPRESSED else None)
    card, weights = plan.card_bytes / GIB, plan.weight_bytes / GIB
    axis.axhline(card, color="tab:red", ls="--", lw=1, label=f"card, {card:g} GiB")
    axis.axhline(weights, color="gray", ls=":", lw=1, label=f"weights, {weights:.1f} GiB")
    axis.axvline(plan.prompt_tokens, color="gray", lw=0.6)
    top = max(points[-1][1] for points in needs.values())
    axis.set_ylim(0, 1.08 * max(card, min(top, 2 * card), weights))
    axis.set_xlim(0, max(points[-1][0] for points in needs.values()))
    axis.set_xlabel(f"prompt (tokens); the gray line: {plan.prompt_tokens}")
    axis.set_ylabel("weights and cache (GiB)")
    axis.legend(fontsize=8)
    title = (
        f"{plan.model.name}, {plan.model.dtype}, batch {plan.batch}, {plan.new_tokens} new tokens"
    )
    axis.set_title(title, fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_bench(ratios: Sequence[Ratio], path: Path) -> None:
    """Ratios with their quartiles; over lengths, a step of decoding and the parts of a request."""
    single = [each for each in ratios if not each.tokens]
    steps = [each for each in ratios if each.tokens and each.unit == "ms/token"]
    parts = [each for each in ratios if each.tokens and each.unit == "s"]
    wide = [group for group in (steps, parts) if group]
    figure, grid = plt.subplots(
        1 + bool(wide),
        max(1, len(wide)),
        figsize=(12, 1.5 + 0.3 * len(single) + 3.6 * bool(wide)),
        height_ratios=[1 + 0.3 * len(single), *([3.6] if wide else [])],
        squeeze=False,
        layout="constrained",
    )
    for axis in grid[0, 1:]:
        axis.remove()
    if len(wide) > 1:
        grid[0, 0].set_subplotspec(grid[0, 0].get_gridspec()[0, :])
    _dots(grid[0, 0], single)
    for axis, group in zip(grid[-1] if wide else [], wide, strict=True):
        _over_lengths(axis, group)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _dots(axis: Axes, ratios: Sequence[Ratio]) -> None:
    """A row for every ratio."""
    for row, each in enumerate(ratios):
        axis.plot([each.low, each.high], [row, row], color="tab:blue", lw=1.5)
        axis.plot(each.ratio, row, "o", color="tab:blue", ms=5)
    axis.axvline(1, color="black", lw=0.6, ls=":")
    axis.set_yticks(range(len(ratios)), [each.name for each in ratios], fontsize=7)
    axis.set_ylim(len(ratios) - 0.5, -0.5)
    axis.set_xlabel("ours / plain, with quartiles")


def _over_lengths(axis: Axes, ratios: Sequence[Ratio]) -> None:
    """Ours and plain over the length of the prompt, a colour for each thing measured."""
    groups: dict[str, list[Ratio]] = {}
    for each in sorted(ratios, key=lambda each: each.tokens):
        words = each.name.removesuffix(" / plain").replace(f" after {each.tokens}", "")
        groups.setdefault(words, []).append(each)
    for number, (label, group) in enumerate(groups.items()):
        lengths, colour = [each.tokens for each in group], f"C{number}"
        axis.plot(lengths, [each.ours for each in group], "o-", ms=4, color=colour, label=label)
        plain = "the same, uncompressed"
        values = [each.plain for each in group]
        axis.plot(lengths, values, "s--", ms=4, lw=1, color=colour, mfc="none", label=plain)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("prompt (tokens)")
    axis.set_ylabel({"s": "seconds"}.get(ratios[0].unit, ratios[0].unit))
    if ratios[0].unit == "s":
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7)


QUALITIES = {
    Quality.found: "share of needles that are found",
    Quality.agreement: "share of tokens that stay the likeliest",
    Quality.likeness: "exp(-KL), mean over prompts",
}


def plot_tuning(tuned: Tuned, path: Path, title: str) -> None:
    """Quality against tokens held: what was tried, the front of it, and what was held back.

    Bars go from the mean down to the lower bound that decides.
    """
    figure, axis = plt.subplots(figsize=(9, 7.6), layout="constrained")
    x, y = _held(tuned.searched), [each.quality.value for each in tuned.searched]
    axis.scatter(x, y, s=16, color="0.72", label="tried, searching prompts")
    ahead = front(tuned.searched)
    # Up to the whole cache: whatever holds more could be replaced by what the line says.
    x, y = [*_held(ahead), tuned.whole], [each.quality.value for each in ahead]
    axis.step(x, [*y, y[-1]], where="post", color="0.45", lw=1.2, label="their Pareto front")
    bound = f"down to the {tuned.confidence:.0%} lower bound"
    _bars(axis, tuned.judged, "o", "tab:blue", f"candidates, held-back prompts, {bound}")
    looks = zip("sDsD", ("tab:red", "tab:orange", "tab:purple", "tab:brown"), strict=True)
    for number, (look, (name, each)) in enumerate(
        zip(looks, tuned.references.items(), strict=False)
    ):
        # The later ones may lie on the first two.
        _bars(axis, [each], *look, f"{name}: {each.policy}", hollow=number > 1)
    axis.axhline(tuned.level, color="black", ls="--", lw=1, label=f"asked for: {tuned.level:g}")
    axis.axvline(tuned.whole, color="gray", ls=":", lw=1, label=f"whole cache, {tuned.whole:.0f}")
    best = tuned.recommended
    if best is not None:
        axis.scatter(
            [best.held_tokens],
            [best.quality.value],
            label=f"recommended: {best.policy}",
            marker="*",
            s=260,
            color="tab:green",
            edgecolor="black",
            zorder=4,
        )
    axis.set_xscale("log", base=2)
    axis.set_xlim(0.9 * min(_held(tuned.searched)), 1.08 * tuned.whole)
    ticks = [2.0**power * part for power in range(2, 24) for part in (1, 1.5)]
    left, right = axis.get_xlim()
    axis.set_xticks([tick for tick in ticks if left <= tick <= right])
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.minorticks_off()
    axis.set_ylim(-0.05, 1.08)
    axis.set_xlabel("tokens held in the end (mean over layers, per KV head)")
    axis.set_ylabel(QUALITIES[tuned.quality])
    axis.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside lower center")
    axis.set_title(title, fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _held(outcomes: Sequence[Outcome]) -> list[float]:
    return [each.held_tokens for each in outcomes]


def _bars(
    axis: Any,
    outcomes: Sequence[Outcome],
    marker: str,
    colour: str,
    label: str,
    hollow: bool = False,
) -> None:
    means = [each.quality.value for each in outcomes]
    down = [max(0.0, each.quality.value - each.bound) for each in outcomes]
    axis.errorbar(
        _held(outcomes),
        means,
        yerr=[down, [0.0] * len(down)],
        fmt=marker,
        ms=10 if hollow else 6,
        mfc="none" if hollow else colour,
        lw=1.4,
        capsize=3,
        color=colour,
        label=label,
        zorder=3,
    )
