"""Reference outputs of single functions: `kernels.safetensors` and `sampling.safetensors`."""

import copy

import torch
from dflash.model import _sampling_probs
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen_moe
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

GDN_LENGTHS = (1, 5, 63, 64, 65, 130)
SAMPLING = ((1.0, 1.0, 0), (0.7, 0.9, 0), (1.0, 0.95, 20), (0.6, 0.8, 5), (1.3, 1.0, 8))


def kernel_inputs(preset, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random inputs of `kernel_outputs`."""

    def normal(*shape, std=1.0, mean=0.0):
        return mean + std * torch.randn(shape, generator=generator)

    heads, dk, dv = preset.gdn_value_heads, preset.gdn_key_dim, preset.gdn_value_dim
    hidden, head_dim = preset.hidden, preset.head_dim
    x = {}
    for t in GDN_LENGTHS:
        x[f"gdn.T{t}.q"] = normal(2, t, heads, dk)
        x[f"gdn.T{t}.k"] = normal(2, t, heads, dk)
        x[f"gdn.T{t}.v"] = normal(2, t, heads, dv)
        decay = torch.rand(heads, generator=generator) * 3
        x[f"gdn.T{t}.g"] = -decay * torch.nn.functional.softplus(normal(2, t, heads, mean=-2.0))
        x[f"gdn.T{t}.beta"] = normal(2, t, heads).sigmoid()
        x[f"gdn.T{t}.s0"] = normal(2, heads, dk, dv, std=0.5)
    for name, mean in (("rmsnorm", 0.0), ("gnorm", 1.0)):
        x[f"{name}.x"] = normal(3, 7, hidden)
        x[f"{name}.w"] = normal(hidden, std=0.2, mean=mean)
    x["gnorm.z"] = normal(3, 7, hidden)
    x["l2.x"] = normal(3, 7, hidden)
    x["rope.pos"] = torch.randint(0, 90, (3, 2, 9), generator=generator)
    x["rope.q"] = normal(2, preset.heads, 9, head_dim)
    x["rope.k"] = normal(2, preset.kv_heads, 9, head_dim)
    x["moe.x"] = normal(2, 9, hidden)
    shapes = {
        "gate.weight": ((8, hidden), 0.5),
        "experts.gate_up_proj": ((8, 96, hidden), 0.15),
        "experts.down_proj": ((8, hidden, 48), 0.15),
        "shared_expert.gate_proj.weight": ((80, hidden), 0.15),
        "shared_expert.up_proj.weight": ((80, hidden), 0.15),
        "shared_expert.down_proj.weight": ((hidden, 80), 0.15),
        "shared_expert_gate.weight": ((1, hidden), 0.15),
    }
    for name, (shape, std) in shapes.items():
        x[f"moe.w.{name}"] = normal(*shape, std=std)
    return x


@torch.no_grad()
def kernel_outputs(x: dict[str, torch.Tensor], target_config) -> dict[str, torch.Tensor]:
    """Outputs of transformers' functions for the inputs `x` (which are in the result too)."""
    out = dict(x)
    for t in GDN_LENGTHS:
        name = f"gdn.T{t}"
        args = [x[f"{name}.{a}"] for a in ("q", "k", "v", "g", "beta")]
        for case, state in (("zero", None), ("init", x[f"{name}.s0"])):
            for form, function in (
                ("chunk", qwen.torch_chunk_gated_delta_rule),
                ("rec", qwen.torch_recurrent_gated_delta_rule),
            ):
                y, end = function(
                    *args,
                    initial_state=state,
                    output_final_state=True,
                    use_qk_l2norm_in_kernel=True,
                )
                out[f"{name}.{case}.{form}_out"], out[f"{name}.{case}.{form}_state"] = y, end

    norm = qwen.Qwen3_5RMSNorm(x["rmsnorm.w"].numel(), eps=1e-6)
    norm.weight.copy_(x["rmsnorm.w"])
    out["rmsnorm.y"] = norm(x["rmsnorm.x"])
    gated = qwen.Qwen3_5RMSNormGated(x["gnorm.w"].numel(), eps=1e-6)
    gated.weight.copy_(x["gnorm.w"])
    out["gnorm.y"] = gated(x["gnorm.x"], x["gnorm.z"])
    out["l2.y"] = qwen.l2norm(x["l2.x"], dim=-1, eps=1e-6)

    rope = qwen.Qwen3_5TextRotaryEmbedding(target_config)
    out["rope.inv_freq"] = rope.inv_freq
    out["rope.cos"], out["rope.sin"] = rope(x["rope.q"], x["rope.pos"])
    out["rope.q_out"], out["rope.k_out"] = qwen.apply_rotary_pos_emb(
        x["rope.q"], x["rope.k"], out["rope.cos"], out["rope.sin"]
    )
    published = copy.deepcopy(target_config)
    published.head_dim = 256
    published.rope_parameters = dict(
        rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25,
        mrope_section=[11, 11, 10], mrope_interleaved=True,
    )  # fmt: skip
    real = qwen.Qwen3_5TextRotaryEmbedding(published)
    out["rope_real.cos"], out["rope_real.sin"] = real(x["rope.q"], x["rope.pos"])

    moe = qwen_moe.Qwen3_5MoeSparseMoeBlock(
        Qwen3_5MoeTextConfig(
            hidden_size=x["moe.x"].shape[-1],
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=x["moe.w.experts.down_proj"].shape[-1],
            shared_expert_intermediate_size=x["moe.w.shared_expert.up_proj.weight"].shape[0],
        )
    )
    moe.load_state_dict({k[len("moe.w.") :]: v for k, v in x.items() if k.startswith("moe.w.")})
    y = moe(x["moe.x"])
    out["moe.y"] = (y[0] if isinstance(y, tuple) else y).view_as(x["moe.x"])
    tokens = x["moe.x"].flatten(0, 1)
    out["moe.logits"], out["moe.scores"], out["moe.idx"] = moe.gate(tokens)
    return out


def sampling_inputs(generator: torch.Generator, vocab=40, columns=5, cases=24):
    """Logits, proposal laws, and per case the proposals and the uniforms."""
    x = {"samp.logits": 2.0 * torch.randn((1, columns + 1, vocab), generator=generator)}
    # Proposal laws near the target's, so that both acceptance and rejection occur.
    noisy = x["samp.logits"][:, :columns] + 0.7 * torch.randn(
        (1, columns, vocab), generator=generator
    )
    x["rej.draft_probs"] = torch.softmax(noisy, dim=-1)
    top = noisy.topk(4, dim=-1)
    x["rej2.indices"], x["rej2.draft_probs"] = top.indices, torch.softmax(top.values, dim=-1)
    for c in range(cases):
        draws = torch.multinomial(x["rej.draft_probs"][0], 1, generator=generator)[:, 0]
        x[f"rej.{c}.tokens"] = draws[None]
        draws = torch.multinomial(x["rej2.draft_probs"][0], 1, generator=generator)
        x[f"rej2.{c}.tokens"] = x["rej2.indices"][0].gather(-1, draws)[None, :, 0]
        for kind in ("rej", "rej2"):
            x[f"{kind}.{c}.u"] = torch.rand((1, columns), generator=generator)
    return x


def sampling_outputs(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Processed laws (the package's function) and the package's rejection rule with given `u`.

    The package's `_rejection_sample` draws its own uniforms and the final token; here is the same
    rule, statement by statement, with both left open.
    """
    out = dict(x)
    for temperature, top_p, top_k in SAMPLING:
        law = _sampling_probs(x["samp.logits"], temperature, top_p, top_k)
        out[f"samp.T{temperature}_p{top_p}_k{top_k}"] = law
    target = out["rej.target_probs"] = out["samp.T1.0_p1.0_k0"].clone()
    for kind in ("rej", "rej2"):
        draft, indices = x[f"{kind}.draft_probs"], x.get(f"{kind}.indices")
        columns = draft.shape[1]
        cases = sum(name.startswith(f"{kind}.") and name.endswith(".u") for name in x)
        for c in range(cases):
            tokens, u = x[f"{kind}.{c}.tokens"], x[f"{kind}.{c}.u"]
            p = target[:, :columns].gather(-1, tokens[..., None])[..., 0]
            if indices is None:
                q = draft.gather(-1, tokens[..., None])[..., 0]
            else:
                q = (draft * (indices == tokens[..., None])).sum(-1)
            accepted = (u * q < p).int().cumprod(-1).sum(-1)[0].item()
            law = target[0, accepted].clone()
            if accepted < columns:
                if indices is None:
                    law -= draft[0, accepted]
                else:
                    law.scatter_add_(0, indices[0, accepted], -draft[0, accepted])
                law.clamp_min_(0)
                law = law / law.sum() if law.sum() > 0 else target[0, accepted].clone()
            out[f"{kind}.{c}.accepted"] = torch.tensor(accepted)
            out[f"{kind}.{c}.resample_dist"] = law[None]
    return out
