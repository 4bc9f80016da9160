"""Reference outputs of the target: `dense_text/oracle.safetensors` and residual taps."""

import copy
from collections.abc import Sequence

import torch
from transformers import DynamicCache


class ResidualTaps:
    """Context manager: `outputs[i]` is the residual output of block i of the last forward.

    Hooks, because `output_hidden_states` gives the last block's output after the final norm only.
    """

    def __init__(self, target):
        self._blocks = target.model.layers
        self.outputs: dict[int, torch.Tensor] = {}

    def __enter__(self):
        self._hooks = [
            block.register_forward_hook(
                lambda _, __, out, i=i: self.outputs.update(
                    {i: out if torch.is_tensor(out) else out[0]}
                )
            )
            for i, block in enumerate(self._blocks)
        ]
        return self

    def __exit__(self, *exc):
        for hook in self._hooks:
            hook.remove()

    def features(self, layer_ids: Sequence[int]) -> torch.Tensor:
        """[1, T, taps * H]: taps in the given order."""
        return torch.cat([self.outputs[i] for i in layer_ids], dim=-1)


def _cache_tensors(cache: DynamicCache, prefix: str) -> dict[str, torch.Tensor]:
    tensors = {}
    for i, layer in enumerate(cache.layers):
        if hasattr(layer, "recurrent_states"):
            tensors[f"{prefix}.layer{i}.recurrent"] = layer.recurrent_states[0]
            tensors[f"{prefix}.layer{i}.conv"] = layer.conv_states[0]
        else:
            tensors[f"{prefix}.layer{i}.key"] = layer.keys
            tensors[f"{prefix}.layer{i}.value"] = layer.values
    return {name: tensor.clone() for name, tensor in tensors.items()}


@torch.no_grad()
def target_oracle(target, inputs: dict[str, torch.Tensor], decode_steps: int, greedy_tokens: int):
    """All outputs for the prompts `short`, `long` and the padded batch.

    Args:
      inputs: `{short,long}.{input_ids,extra_ids}`, `padded.{input_ids,attention_mask}`, int64.
      decode_steps: how many of `extra_ids` are fed one at a time.
      greedy_tokens: length of the greedy continuation of the short prompt.

    Returns:
      The inputs and outputs under the names of `tests/fixtures/README.md`.
    """
    out = dict(inputs)
    layers = target.config.num_hidden_layers
    for prompt in ("short", "long"):
        ids, extra = inputs[f"{prompt}.input_ids"], inputs[f"{prompt}.extra_ids"]
        cache = DynamicCache(config=target.config)
        with ResidualTaps(target) as taps:
            prefill = target(ids, past_key_values=cache, use_cache=True, output_hidden_states=True)
        out[f"{prompt}.prefill.hidden0"] = prefill.hidden_states[0]
        for i in range(layers):
            out[f"{prompt}.prefill.hidden{i + 1}"] = taps.outputs[i]
        out[f"{prompt}.prefill.final_norm"] = prefill.hidden_states[-1]
        out[f"{prompt}.prefill.logits"] = prefill.logits
        out |= _cache_tensors(cache, f"{prompt}.prefill")

        stepped = copy.deepcopy(cache)
        steps = [
            target(extra[:, t : t + 1], past_key_values=stepped, use_cache=True).logits
            for t in range(decode_steps)
        ]
        out[f"{prompt}.decode.logits"] = torch.cat(steps, dim=1)
        out |= _cache_tensors(stepped, f"{prompt}.decode_end")

        block = target(extra, past_key_values=cache, use_cache=True, output_hidden_states=True)
        for i in range(layers):
            out[f"{prompt}.block.hidden{i}"] = block.hidden_states[i]
        out[f"{prompt}.block.logits"] = block.logits
        out |= _cache_tensors(cache, f"{prompt}.block_end")

    tokens, _ = greedy(target, inputs["short.input_ids"], greedy_tokens)
    out["greedy.output_ids"] = tokens
    out["padded.logits"] = target(
        inputs["padded.input_ids"], attention_mask=inputs["padded.attention_mask"]
    ).logits
    return out


@torch.no_grad()
def greedy(target, prompt: torch.Tensor, new_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain greedy decoding with the cache, one token at a time.

    Returns:
      ids [1, T + new_tokens] and, per new token, top logit minus second logit [new_tokens].
    """
    cache = DynamicCache(config=target.config)
    ids, step, gaps = prompt, prompt, []
    for _ in range(new_tokens):
        logits = target(step, past_key_values=cache, use_cache=True).logits[:, -1]
        best = logits.topk(2, dim=-1)
        gaps.append((best.values[0, 0] - best.values[0, 1]).item())
        step = best.indices[:, :1]
        ids = torch.cat([ids, step], dim=1)
    return ids, torch.tensor(gaps)
