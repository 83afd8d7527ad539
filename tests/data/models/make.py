#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
# Makes the models of this folder and their logits with Hugging Face transformers.
"""Random weights, rounded to the type they are stored in; logits in f32 of the rounded weights.
The same seeds give the same files. Runs in this folder. Needs torch, transformers and safetensors."""
import glob
import json
import os
import shutil

import torch
from transformers import (LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM,
                          Qwen2Config, Qwen2ForCausalLM)

IDS = 100
COMMON = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
              num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5,
              bos_token_id=1, eos_token_id=2, attn_implementation="eager")

MODELS = {
    # Biases of q, k and v; tied output; heads of 16.
    "qwen2": (Qwen2ForCausalLM, torch.bfloat16, None, Qwen2Config(
        max_position_embeddings=256, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **COMMON)),
    # In several files, heads that are not hidden / heads wide, and end tokens in a list.
    "mistral": (MistralForCausalLM, torch.bfloat16, "60KB", MistralConfig(
        max_position_embeddings=256, sliding_window=None, head_dim=32,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        **{**COMMON, "eos_token_id": [2, 5]})),
    "llama-linear": (LlamaForCausalLM, torch.float16, None, LlamaConfig(
        max_position_embeddings=256, tie_word_embeddings=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        **COMMON)),
    # The ids reach far beyond the original context.
    "llama-yarn": (LlamaForCausalLM, torch.bfloat16, None, LlamaConfig(
        max_position_embeddings=256, head_dim=32,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0,
                         "original_max_position_embeddings": 32, "beta_fast": 8.0,
                         "beta_slow": 0.5, "truncate": False},
        **COMMON)),
}


def fill(model, generator):
    for name, parameter in model.named_parameters():
        width = parameter.shape[-1]
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.data = 1 + 0.2 * noise
        elif name.endswith("bias"):
            parameter.data = 0.5 * noise
        else:
            parameter.data = (1 if "embed" in name else 1.5 / width ** 0.5) * noise


def main():
    for number, (name, (kind, dtype, shard, config)) in enumerate(MODELS.items()):
        generator = torch.Generator().manual_seed(100 + number)
        shutil.rmtree(name, ignore_errors=True)
        model = kind(config)
        fill(model, generator)
        model.tie_weights()
        model.to(dtype).save_pretrained(name, **({"max_shard_size": shard} if shard else {}))
        for file in glob.glob(os.path.join(name, "*.safetensors")):
            os.chmod(file, 0o644)
        # Opened anew, for .to() rounds the frequencies of RoPE as well.
        model = kind.from_pretrained(name, dtype=torch.float32, attn_implementation="eager")
        ids = torch.randint(3, config.vocab_size, (1, IDS), generator=generator)
        with torch.no_grad():
            logits = model(ids).logits[0]
        logits.numpy().astype("<f4").tofile(os.path.join(name, "logits_raw.f32"))
        with open(os.path.join(name, "expected.json"), "w", encoding="utf-8") as file:
            json.dump({"token_ids": ids[0].tolist()}, file)
            file.write("\n")
        rope = model.model.rotary_emb
        print(name, "logits up to", float(logits.abs().max()), "attention factor",
              rope.attention_scaling, "frequencies", rope.inv_freq.tolist()[:16:3])


main()
