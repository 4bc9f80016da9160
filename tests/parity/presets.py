"""Shapes of the fixtures, the configs made of them, and the random initialisation.

`PRESETS["default"]` has the shapes of the committed `tests/fixtures`. The others vary what is
easily hard-wired by mistake: head counts and their ratios, the q/k-to-v ratio and dims of the
gated delta rule, tap count, window, vocabulary, block width, convolution taps, selector size.
"""

import dataclasses

import torch
from dflash.model import DFlash2DraftModel, DFlashDraftModel
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config


@dataclasses.dataclass(frozen=True)
class Preset:
    """All sizes of one fixture directory; field comments only where the name does not say it."""

    vocab: int = 512
    hidden: int = 64
    # target
    intermediate: int = 160
    layers: int = 8
    full_interval: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary_factor: float = 0.25
    mrope_section: tuple[int, int, int] = (3, 3, 2)
    target_theta: float = 1e7
    gdn_key_heads: int = 2
    gdn_value_heads: int = 4
    gdn_key_dim: int = 16
    gdn_value_dim: int = 32
    # target oracle
    short: int = 11
    long: int = 150
    padding: int = 5  # pads in row 0 of the padded batch
    decode_steps: int = 6
    greedy_tokens: int = 48
    # draft
    draft_intermediate: int = 128
    draft_layers: int = 4
    draft_heads: int = 4
    draft_kv_heads: int = 2
    draft_head_dim: int = 32
    draft_theta: float = 1e6
    taps: tuple[int, ...] = (1, 3, 5)
    window: int = 16
    block: int = 8
    mask_id: int = 499
    conv_taps: int = 3
    conv_group: int = 16
    rank: int = 8
    top_k: int = 4
    # draft oracle: context columns appended before each round; the last round is narrow
    context: int = 60
    appended: tuple[int, ...] = (27, 3, 1, 9, 4)
    last_width: int = 3
    # whole generations
    prompt: int = 24
    new_tokens: int = 64
    prompts: int = 6
    fitted_prompts: int = 4  # the drafts are fitted to the text after these


PRESETS = {
    "default": Preset(),
    # Odd ratios: 6/2 and 3/9 heads, dk > dv, two taps, odd block width, one kv head in the draft.
    "wide": Preset(
        vocab=640, hidden=96, intermediate=128, layers=6, full_interval=3, heads=6, kv_heads=2,
        head_dim=32, rotary_factor=0.5, mrope_section=(4, 2, 2), target_theta=1e6,
        gdn_key_heads=3, gdn_value_heads=9, gdn_key_dim=24, gdn_value_dim=16, short=13, long=101,
        padding=4, decode_steps=4, greedy_tokens=40, draft_intermediate=80, draft_layers=3,
        draft_heads=3, draft_kv_heads=1, draft_head_dim=16, draft_theta=1e7, taps=(0, 4),
        window=12, block=7, mask_id=639, conv_taps=2, conv_group=8, rank=12, top_k=16,
        context=52, appended=(19, 2, 7, 1, 11), last_width=4, prompt=17, new_tokens=50, prompts=4,
        fitted_prompts=3,
    ),
    # Ratios of one, a single tap at the last block (before the final norm), a block of 16 as wide
    # as the window, one convolution tap. (The package cannot run more taps than width + 1, and the
    # narrowest block of a generation has two columns.)
    "last_tap": Preset(
        vocab=320, hidden=48, intermediate=96, layers=4, full_interval=2, heads=2, kv_heads=2,
        head_dim=32, rotary_factor=0.25, mrope_section=(2, 1, 1), gdn_key_heads=2,
        gdn_value_heads=2, gdn_key_dim=32, gdn_value_dim=32, short=7, long=70, padding=3,
        draft_intermediate=64, draft_layers=2, draft_heads=2, draft_kv_heads=2, taps=(3,),
        window=16, block=16, mask_id=7, conv_taps=1, conv_group=4, rank=4, top_k=5,
        context=70, appended=(5, 16, 1, 17, 2), last_width=2, prompt=9, new_tokens=60,
    ),
}  # fmt: skip


def target_config(preset: Preset, tied: bool = False) -> Qwen3_5TextConfig:
    """The target's config; gated delta rule layers with a full layer every `full_interval`."""
    return Qwen3_5TextConfig(
        vocab_size=preset.vocab,
        hidden_size=preset.hidden,
        intermediate_size=preset.intermediate,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.kv_heads,
        head_dim=preset.head_dim,
        layer_types=[
            "linear_attention" if (i + 1) % preset.full_interval else "full_attention"
            for i in range(preset.layers)
        ],
        linear_num_key_heads=preset.gdn_key_heads,
        linear_num_value_heads=preset.gdn_value_heads,
        linear_key_head_dim=preset.gdn_key_dim,
        linear_value_head_dim=preset.gdn_value_dim,
        max_position_embeddings=4096,
        rope_parameters=dict(
            rope_type="default",
            rope_theta=preset.target_theta,
            partial_rotary_factor=preset.rotary_factor,
            mrope_section=list(preset.mrope_section),
            mrope_interleaved=True,
        ),
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )


def draft_config(preset: Preset, version: int, is_causal: bool | None, full: bool = False):
    """The draft's config. `is_causal=None` leaves the key out; `full`: no sliding layer."""
    sliding = 0 if full else preset.draft_layers - 1
    dflash = dict(
        block_size=preset.block,
        mask_token_id=preset.mask_id,
        target_layer_ids=list(preset.taps),
    )
    if version == 2:
        dflash |= dict(
            conv_kernel_size=preset.conv_taps,
            conv_group_size=preset.conv_group,
            selector_rank=preset.rank,
            selector_top_k=preset.top_k,
        )
    return Qwen3Config(
        vocab_size=preset.vocab,
        hidden_size=preset.hidden,
        intermediate_size=preset.draft_intermediate,
        num_hidden_layers=preset.draft_layers,
        num_attention_heads=preset.draft_heads,
        num_key_value_heads=preset.draft_kv_heads,
        head_dim=preset.draft_head_dim,
        layer_types=["sliding_attention"] * sliding
        + ["full_attention"] * (preset.draft_layers - sliding),
        use_sliding_window=not full,
        sliding_window=None if full else preset.window,
        max_window_layers=0,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_parameters=dict(rope_type="default", rope_theta=preset.draft_theta),
        tie_word_embeddings=False,
        num_target_layers=preset.layers,
        dflash_config=dflash,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
        **({} if is_causal is None else dict(is_causal=is_causal)),
    )


@torch.no_grad()
def randomise(model: torch.nn.Module, generator: torch.Generator) -> torch.nn.Module:
    """Weights large enough that every part of the model matters to the output."""

    def normal(parameter, std, mean=0.0):
        parameter.copy_(mean + std * torch.randn(parameter.shape, generator=generator))

    width = model.config.hidden_size**-0.5
    plain_norms = not isinstance(model, Qwen3_5ForCausalLM)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.copy_(-4.0 + 4.0 * torch.rand(parameter.shape, generator=generator))
        elif name.endswith("dt_bias"):
            normal(parameter, 1.2, mean=-2.0)
        elif name.endswith("conv1d.weight"):
            normal(parameter, 0.43)
        elif name.endswith("base_kernel"):  # [2, taps, H]: near the identity
            normal(parameter, 0.2)
            parameter[:, 0] += 1.0
        elif name.endswith("kernel_projection.weight"):
            normal(parameter, 0.4 * width)
        elif name.endswith("codebook.weight"):
            normal(parameter, 0.7)
        elif parameter.ndim == 1:  # norms; the target's text norms apply 1 + w
            plain = plain_norms or "linear_attn.norm" in name
            normal(parameter, 0.2, mean=1.0 if plain else 0.0)
        elif name.endswith("embed_tokens.weight"):
            normal(parameter, 1.0)
        elif name.endswith("lm_head.weight"):
            normal(parameter, 2.8 * width)
        else:
            normal(parameter, width)
    return model.eval()


def make_target(preset: Preset, generator: torch.Generator, tied: bool = False):
    """A random target."""
    return randomise(Qwen3_5ForCausalLM(target_config(preset, tied)), generator)


def make_draft(preset: Preset, version: int, is_causal, generator, full: bool = False):
    """A random draft: `DFlashDraftModel` or `DFlash2DraftModel`."""
    model_class = DFlash2DraftModel if version == 2 else DFlashDraftModel
    return randomise(model_class(draft_config(preset, version, is_causal, full)), generator)


def load_draft(directory: str):
    """The official package's model of a draft directory, float32, by its `architectures`."""
    config = Qwen3Config.from_pretrained(directory)
    known = {cls.__name__: cls for cls in (DFlashDraftModel, DFlash2DraftModel)}
    name = (config.architectures or ["(none)"])[0]
    if name not in known:
        raise ValueError(f"{directory}: architecture {name}, expected one of {sorted(known)}")
    return known[name].from_pretrained(directory, dtype=torch.float32).eval()


def random_ids(preset: Preset, generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Uniform token ids without the mask token."""
    ids = torch.randint(0, preset.vocab - 1, shape, generator=generator)
    return ids + (ids >= preset.mask_id).long()
