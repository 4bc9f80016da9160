"""Makes the directory that `tests/fixtures/README.md` describes, from the official packages.

Set up once (CPU wheels suffice) and run from the project root:

    python -m venv parity && parity/bin/pip install torch==2.13.0 transformers==5.15.0 \\
        dflash==0.1.0 safetensors numpy
    parity/bin/python -m tests.parity.make_fixtures --output some/directory --seed 1
    parity/bin/python -m tests.parity.make_fixtures --output other/one --seed 2 --preset wide

Less than a minute on one CPU core. `--preset` chooses other shapes (`tests/parity/presets.py`);
`--only` makes some of the parts. Every part has its own random stream, so a part does not change
when others are left out (the drafts and the whole generations need `dense_text`'s target, which
is made again from its own stream). `tests/parity/check_fixtures.py` recomputes a directory.
"""

import argparse
import pathlib

import torch
from safetensors.torch import save_file

from tests.parity import draft_outputs, fit_draft, function_outputs, presets, speculative
from tests.parity.target_outputs import greedy, target_oracle

PARTS = ("dense_text", "dense_text_tied", "kernels", "drafts", "mid_v1", "mid_v2", "sampling")
DRAFTS = {  # folder: version, is_causal (None = key left out), all layers full
    "draft_v1_default": (1, None, False),
    "draft_v1_noncausal": (1, False, False),
    "draft_v1_causal": (1, True, False),
    "draft_v1_full": (1, None, True),
    "draft_v2_default": (2, None, False),
    "draft_v2_noncausal": (2, False, False),
}
# Smallest margins of a greedy choice that exact comparison of ids can rely on: two correct
# implementations differ by up to 3e-4 in a target logit, by 3e-5 in the logits of these drafts.
TARGET_GAP, DRAFT_GAP = 7e-4, 2e-4
ATTEMPTS = 10


class Maker:
    """Writes the parts of one directory."""

    def __init__(self, output: pathlib.Path, preset: presets.Preset, seed: int):
        self.output, self.preset, self.seed = output, preset, seed

    def stream(self, index: int) -> torch.Generator:
        """The random stream with a fixed index under this seed."""
        return torch.Generator().manual_seed(1000 * self.seed + index)

    def save(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        path = self.output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({k: v.detach().clone().contiguous() for k, v in tensors.items()}, path)

    def report_gap(self, name: str, gap: float, needed: float) -> None:
        note = "" if gap >= needed else f"  <- below {needed}: near a tie, take another seed"
        print(f"  {name}: smallest margin of a greedy choice {gap:.1e}{note}")

    def target(self, tied: bool = False):
        return presets.make_target(self.preset, self.stream(2 if tied else 1), tied)

    def make_target(self, tied: bool) -> None:
        p, name = self.preset, "dense_text_tied" if tied else "dense_text"
        target, stream = self.target(tied), self.stream(3)
        extra = presets.random_ids(p, stream, 1, 8)
        short = presets.random_ids(p, stream, 1, p.short)
        padded = torch.cat([torch.zeros_like(short), short])
        padded[0, p.padding :] = presets.random_ids(p, stream, p.short - p.padding)
        mask = torch.ones_like(padded)
        mask[0, : p.padding] = 0
        inputs = {
            "short.input_ids": short,
            "short.extra_ids": extra,
            "long.input_ids": presets.random_ids(p, stream, 1, p.long),
            "long.extra_ids": extra,
            "padded.input_ids": padded,
            "padded.attention_mask": mask,
        }
        target.save_pretrained(self.output / name)
        oracle = target_oracle(target, inputs, p.decode_steps, p.greedy_tokens)
        self.save(f"{name}/oracle.safetensors", oracle)
        gaps = greedy(target, short, p.greedy_tokens)[1]
        self.report_gap(name, gaps.min().item(), TARGET_GAP)

    def make_kernels(self) -> None:
        inputs = function_outputs.kernel_inputs(self.preset, self.stream(4))
        config = presets.target_config(self.preset)
        self.save("kernels.safetensors", function_outputs.kernel_outputs(inputs, config))

    def make_sampling(self) -> None:
        inputs = function_outputs.sampling_inputs(self.stream(5))
        self.save("sampling.safetensors", function_outputs.sampling_outputs(inputs))

    def make_drafts(self) -> None:
        p, target = self.preset, self.target()
        context = presets.random_ids(p, self.stream(6), 1, p.context)
        inputs = draft_outputs.draft_inputs(
            target, context, p.taps, p.appended, p.block, p.last_width, p.mask_id
        )
        for name, (version, is_causal, full) in DRAFTS.items():
            stream = self.stream(10 + version)  # one set of weights per version
            draft = presets.make_draft(p, version, is_causal, stream, full)
            draft.save_pretrained(self.output / name)
            torch.manual_seed(self.seed)  # the package's sampled walk uses the global stream
            oracle = draft_outputs.draft_oracle(draft, target.lm_head, inputs)
            self.save(f"{name}/oracle.safetensors", oracle)
            self.report_gap(name, draft_outputs.oracle_gap(draft, oracle), DRAFT_GAP)

    def make_mid(self, version: int) -> None:
        """Fits a draft and traces it; tries other prompts if a choice is too near a tie."""
        target, name = self.target(), f"mid_dense_v{version}"
        for attempt in range(ATTEMPTS):
            draft, tensors, target_gap, draft_gap = self.fit_and_trace(version, target, attempt)
            if target_gap >= TARGET_GAP and draft_gap >= DRAFT_GAP:
                break
        draft.save_pretrained(self.output / name)
        self.save(f"{name}/trace.safetensors", tensors)
        for key, lengths in tensors.items():
            if key.endswith(".acceptance_lengths"):
                print(f"  {name}/{key}: {lengths.tolist()}")
        self.report_gap(f"{name} (target)", target_gap, TARGET_GAP)
        self.report_gap(f"{name} (draft)", draft_gap, DRAFT_GAP)

    def fit_and_trace(self, version: int, target, attempt: int):
        """One attempt: the draft, its trace tensors, smallest margins of target and draft."""
        p, stream = self.preset, self.stream(20 + version + 100 * attempt)
        prompts = presets.random_ids(p, self.stream(7 + 100 * attempt), p.prompts, p.prompt)
        plain = [greedy(target, prompt[None], p.new_tokens) for prompt in prompts]
        texts = torch.cat([ids for ids, _ in plain[: p.fitted_prompts]])
        # v1 leaves `is_causal` out, as the oldest published drafts do.
        draft = presets.make_draft(p, version, None if version == 1 else False, stream)
        fit_draft.fit(draft, target, texts, p.prompt, stream)
        tensors, draft_gaps = {}, []
        for i, (prompt, (ids, _)) in enumerate(zip(prompts, plain, strict=True)):
            trace = speculative.generate(target, draft, prompt[None], p.new_tokens)
            if not torch.equal(trace.ids, ids):
                raise RuntimeError(f"p{i}: speculative text differs from greedy text")
            tensors |= {
                f"p{i}.prompt": prompt[None],
                f"p{i}.greedy_ids": ids,
                f"p{i}.output_ids": trace.ids,
                f"p{i}.blocks": trace.padded_blocks(p.block),
                f"p{i}.acceptance_lengths": torch.tensor(trace.published),
            }
            draft_gaps += trace.draft_gaps
        target_gap = min(gaps.min().item() for _, gaps in plain)
        return draft, tensors, target_gap, min(draft_gaps)

    def make(self, part: str) -> None:
        """Makes one of PARTS."""
        print(part, flush=True)
        if part.startswith("dense_text"):
            self.make_target(tied=part.endswith("tied"))
        elif part.startswith("mid"):
            self.make_mid(int(part[-1]))
        else:
            getattr(self, f"make_{part}")()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--preset", choices=sorted(presets.PRESETS), default="default")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    maker = Maker(args.output, presets.PRESETS[args.preset], args.seed)
    for part in args.only:
        maker.make(part)


if __name__ == "__main__":
    main()
