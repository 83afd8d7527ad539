#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Adds the Fisher information of a model's key and value projections to a calibration that
puzzlekv-eval calibrate has written, by which the policy palu shares its ranks.

For each projection: the mean, over its weights, of the root of the mean, over the sequences, of the
squared gradient of the loss, the mean cross-entropy of the next token. Needs torch, transformers
and safetensors, and for the gradients about three times the memory of the model in f32."""
import argparse
import os
import random
import sys

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def geometry(config):
    heads = config.num_attention_heads
    return "layers=%d,hidden=%d,query_heads=%d,kv_heads=%d,head_dim=%d" % (
        config.num_hidden_layers, config.hidden_size, heads,
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads)


def fisher(model, sequences):
    """[layers] for keys and for values; `sequences` yields tensors of ids [length]."""
    projections = [[layer.self_attn.k_proj.weight for layer in model.model.layers],
                   [layer.self_attn.v_proj.weight for layer in model.model.layers]]
    squares = [[torch.zeros_like(w) for w in part] for part in projections]
    count = 0
    model.eval().requires_grad_(False)
    for part in projections:
        for weight in part:
            weight.requires_grad_(True)
    for ids in sequences:
        logits = model(ids[None], use_cache=False).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits.float(), ids[1:]).backward()
        for part, sums in zip(projections, squares):
            for weight, total in zip(part, sums):
                total += weight.grad.square()
                weight.grad = None
        count += 1
    return [torch.stack([(total / count).sqrt().mean() for total in sums]) for sums in squares]


def add(path, parts):
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    for name, values in zip(("fisher.k", "fisher.v"), parts):
        tensors[name] = values.to("cpu", torch.float32).contiguous()
    save_file(tensors, path + ".part", metadata)
    os.replace(path + ".part", path)


def windows(ids, count, length, seed):
    generator = random.Random(seed)
    for i in range(count):
        print("%d of %d sequences" % (i, count), end="\r", file=sys.stderr)
        first = generator.randrange(len(ids) - length + 1)
        yield ids[first:first + length]


def main():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("text", help="a file in UTF-8")
    parser.add_argument("calibration", help="the file to add to")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--device", default="cpu")
    a = parser.parse_args()

    with safe_open(a.calibration, "pt") as file:
        metadata = file.metadata() or {}
    if metadata.get("format") != "puzzlekv-calibration-1":
        sys.exit(f"{a.calibration}: is not a calibration that puzzlekv-eval calibrate has written")
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32).to(a.device)
    if geometry(model.config) != metadata.get("geometry"):
        sys.exit(f"{a.calibration}: is the calibration of another model: it has "
                 f"{metadata.get('geometry')}, this one {geometry(model.config)}")
    with open(a.text, encoding="utf-8") as file:
        ids = AutoTokenizer.from_pretrained(a.model)(file.read(), return_tensors="pt").input_ids[0]
    if len(ids) < a.length:
        sys.exit(f"{a.text}: has {len(ids)} tokens, fewer than the {a.length} of a sequence")
    add(a.calibration,
        fisher(model, windows(ids.to(a.device), a.sequences, a.length, a.seed)))


if __name__ == "__main__":
    main()
