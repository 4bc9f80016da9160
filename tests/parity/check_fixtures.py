"""Recomputes a fixture directory from its own checkpoints and inputs; prints the differences.

    parity/bin/python -m tests.parity.check_fixtures --fixtures tests/fixtures

Every tensor that transformers or the dflash package can produce again is compared. Drafts are
run a second time without a cache (whole context every round). Sampled walks are forced along the
stored path and their q compared. Exit code 1 if a float differs by more than the tolerance of its
kind (`tests/fixtures/README.md`) or if an integer differs.
"""

import argparse
import pathlib
import sys

import torch
from safetensors.torch import load_file
from transformers import Qwen3_5ForCausalLM

from tests.parity import draft_outputs, function_outputs, presets, speculative
from tests.parity.target_outputs import target_oracle

DRAFT_INPUTS = (".target_hidden", ".block_ids", ".noise_embedding", ".position_ids")


class Comparison:
    """Collects differences under a heading and whether one was too large."""

    def __init__(self):
        self.failed = False

    def __call__(self, heading, ours, stored, tolerance, skip=()):
        worst, compared, missing = (0.0, ""), 0, []
        for name, expected in stored.items():
            if any(s in name for s in skip):
                continue
            if name not in ours:
                missing.append(name)
                continue
            compared += 1
            if ours[name].shape != expected.shape:
                self.failed = True
                print(f"  {name}: shape {tuple(ours[name].shape)}, not {tuple(expected.shape)}")
                continue
            difference = (ours[name].double() - expected.double()).abs().max().item()
            worst = max(worst, (difference, name))
            if difference > (tolerance if expected.is_floating_point() else 0):
                self.failed = True
                print(f"  {name}: differs by {difference:.3e}, tolerance {tolerance:.0e}")
        note = f"; not recomputed: {', '.join(missing)}" if missing else ""
        print(f"{heading}: {compared} tensors, largest difference {worst[0]:.2e} {worst[1]}{note}")


def check_target(directory: pathlib.Path, compare: Comparison) -> None:
    stored = load_file(directory / "oracle.safetensors")
    target = Qwen3_5ForCausalLM.from_pretrained(directory).eval()
    inputs = {
        f"{p}.{kind}": stored[f"{p}.{kind}"]
        for p, kinds in (
            ("short", ("input_ids", "extra_ids")),
            ("long", ("input_ids", "extra_ids")),
            ("padded", ("input_ids", "attention_mask")),
        )
        for kind in kinds
    }
    steps = stored["short.decode.logits"].shape[1]
    tokens = stored["greedy.output_ids"].shape[1] - stored["short.input_ids"].shape[1]
    compare(directory.name, target_oracle(target, inputs, steps, tokens), stored, 1e-3)


def check_draft(directory: pathlib.Path, target, compare: Comparison) -> None:
    stored = load_file(directory / "oracle.safetensors")
    draft = presets.load_draft(directory)
    inputs = {
        name: value
        for name, value in stored.items()
        if name.endswith(DRAFT_INPUTS) or name in ("context_ids", "target_embed", "target_lm_head")
    }
    features = draft_outputs.tap_features(target, stored["context_ids"], draft.target_layer_ids)
    rounds = sum(name.endswith(".block_ids") for name in stored)
    taps, begin = {}, 0
    for r in range(rounds):
        end = begin + stored[f"r{r}.target_hidden"].shape[1]
        taps[f"r{r}.target_hidden"] = features[:, begin:end]
        begin = end
    compare(f"{directory.name} taps", taps, {k: stored[k] for k in taps}, 1e-4)
    for cached in (True, False):
        ours = draft_outputs.draft_oracle(draft, target.lm_head, inputs, cached)
        for r in range(rounds if hasattr(draft, "candidate_selector") else 0):
            candidates, path = (stored[f"r{r}.sampled_{x}"] for x in ("candidates", "path"))
            energies = draft_outputs.walk_energies(
                draft, ours[f"r{r}.hidden"][:, 1:], ours[f"r{r}.logits"], candidates,
                stored[f"r{r}.block_ids"][:, 0], path,
            )  # fmt: skip
            ours[f"r{r}.sampled_q"] = torch.softmax(energies / draft_outputs.TEMPERATURE, dim=-1)
        skip = ("sampled_path", "sampled_candidates")
        compare(f"{directory.name} {'' if cached else 'un'}cached", ours, stored, 3e-4, skip)


def check_trace(directory: pathlib.Path, target, compare: Comparison) -> None:
    stored = load_file(directory / "trace.safetensors")
    draft, ours = presets.load_draft(directory), {}
    for i in range(sum(name.endswith(".prompt") for name in stored)):
        prompt, ids = stored[f"p{i}.prompt"], stored[f"p{i}.output_ids"]
        trace = speculative.generate(target, draft, prompt, ids.shape[1] - prompt.shape[1])
        ours |= {
            f"p{i}.prompt": prompt,
            f"p{i}.output_ids": trace.ids,
            f"p{i}.greedy_ids": trace.ids,
            f"p{i}.blocks": trace.padded_blocks(draft.block_size),
            f"p{i}.acceptance_lengths": torch.tensor(trace.published),
        }
    compare(directory.name, ours, stored, 0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fixtures", type=pathlib.Path, default=pathlib.Path("tests/fixtures"))
    root = parser.parse_args().fixtures
    torch.set_num_threads(1)
    compare = Comparison()
    for name in ("dense_text", "dense_text_tied"):
        check_target(root / name, compare)
    target = Qwen3_5ForCausalLM.from_pretrained(root / "dense_text").eval()
    kernels = load_file(root / "kernels.safetensors")
    compare(
        "kernels", function_outputs.kernel_outputs(kernels, target.config), kernels, 5e-6, ("vis.",)
    )
    sampling = load_file(root / "sampling.safetensors")
    compare("sampling", function_outputs.sampling_outputs(sampling), sampling, 1e-6)
    for directory in sorted(root.glob("draft_*")):
        check_draft(directory, target, compare)
    for directory in sorted(root.glob("mid_*")):
        check_trace(directory, target, compare)
    sys.exit(compare.failed)


if __name__ == "__main__":
    main()
