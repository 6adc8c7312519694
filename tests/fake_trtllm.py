"""Stand-ins for TensorRT-LLM's commands, which take what the real ones take and compute nothing.

`install(place)` puts `trtllm-build`, `trtllm-serve` and `convert_checkpoint.py` there, this file under three names.
Their argv is held to the flag snapshot; what they write has the real layout with a few bytes for weights. The server
predicts every word of the vocabulary alike. What is made with them is simulated: the library is not installed.

Variables steer what goes wrong: FAKE_TRTLLM_<COMMAND> is a JSON object, see `quirks`.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

RELEASE = "1.2.1"
ROOT = Path(__file__).resolve().parents[1]
SNAPSHOT = ROOT / "pipelines" / "engine" / "trtllm" / "flags_1_2_1.json"
CONVERTER = "convert_checkpoint.py"
FOLDERS = ("llama", "qwen")


def install(place: Path) -> Path:
    """Write the commands; give the directory for PATH. The examples directory is `place`/examples."""
    programs = place / "bin"
    converters = [place / "examples" / "models" / "core" / folder for folder in FOLDERS]
    for directory in (programs, *converters):
        directory.mkdir(parents=True)
    lines = ["import sys", f"sys.path.insert(0, {str(ROOT)!r})", "from tests.fake_trtllm import main", "main(sys.argv)"]
    text = "\n".join([f"#!{sys.executable}", *lines, ""])
    for file in (programs / "trtllm-build", programs / "trtllm-serve", *(c / CONVERTER for c in converters)):
        file.write_text(text)
        file.chmod(0o755)
    return programs


def main(argv: list[str]) -> None:
    name = Path(argv[0]).name
    options = vars(parser_of(name).parse_args(argv[1:]))
    {CONVERTER: convert, "trtllm-build": build, "trtllm-serve": serve}[name](options, quirks(name))


def parser_of(name: str) -> argparse.ArgumentParser:
    """argparse with the options of the snapshot's file: a reading of it that owes nothing to our own."""
    command = json.loads(SNAPSHOT.read_text())["commands"][name]
    parser = argparse.ArgumentParser(name, allow_abbrev=False)
    for place in command["positionals"]:
        parser.add_argument(place)
    for flag, option in command["options"].items():
        names, kind = (flag, *option.get("aliases", ())), option["type"]
        if kind == "flag":
            parser.add_argument(*names, action="store_true")
            continue
        convert_to = {"str": str, "int": int, "float": float}[kind]
        choices = [convert_to(choice) for choice in option.get("choices", ())] or None
        many = "+" if option.get("many") else None
        parser.add_argument(*names, type=convert_to, choices=choices, nargs=many, default=option.get("default"))
    return parser


def quirks(name: str) -> dict[str, Any]:
    """exit: code to end with; say: line to print; change: dotted path to value in what is written; drop_rank: true;
    rows_lost: rows missing from context logits; tokens_lost: tokens missing from answers; die: true."""
    variable = "FAKE_TRTLLM_" + name.removesuffix(".py").removeprefix("trtllm-").upper()
    found: dict[str, Any] = json.loads(os.environ.get(variable, "{}"))
    if "say" in found:
        print(found["say"], flush=True)
    if "exit" in found:
        sys.exit(found["exit"])
    return found


def convert(options: dict[str, Any], quirk: dict[str, Any]) -> None:
    source = Path(options["model_dir"])
    about = json.loads((source / "config.json").read_text())
    quantized = about.get("quantization_config") or {}
    quantization: dict[str, Any] = {"quant_algo": None, "kv_cache_quant_algo": None}
    if options["use_weight_only"]:
        assert Path(options["quant_ckpt_path"]).is_file()
        algo = {"int4_gptq": "W4A16_GPTQ", "int8_gptq": "W8A16_GPTQ"}[options["weight_only_precision"]]
        size = quantized.get("group_size", options["group_size"])
        quantization |= {"quant_algo": algo, "group_size": size, "has_zero_point": quantized.get("sym", True)}
    ranks = options["tp_size"] * options["pp_size"]
    written = {
        "architecture": about["architectures"][0],
        "dtype": "float16" if options["dtype"] == "auto" else options["dtype"],
        "num_hidden_layers": about["num_hidden_layers"],
        "num_attention_heads": about["num_attention_heads"],
        "num_key_value_heads": about.get("num_key_value_heads", about["num_attention_heads"]),
        "hidden_size": about["hidden_size"],
        "intermediate_size": about["intermediate_size"],
        "vocab_size": about["vocab_size"],
        "max_position_embeddings": about["max_position_embeddings"],
        "rotary_base": about.get("rope_theta", 10000.0),
        "mapping": {"world_size": ranks, "tp_size": options["tp_size"], "pp_size": options["pp_size"]},
        "quantization": quantization,
    }
    write_checkpoint(Path(options["output_dir"]), written, quirk)


def write_checkpoint(out: Path, config: dict[str, Any], quirk: dict[str, Any]) -> None:
    """A TensorRT-LLM checkpoint with one small tensor a rank."""
    out.mkdir(parents=True, exist_ok=True)
    ranks = config["mapping"]["world_size"]
    (out / "config.json").write_text(json.dumps(changed(config, quirk)))
    for rank in range(ranks - bool(quirk.get("drop_rank"))):
        header = json.dumps(
            {"transformer.ln_f.weight": {"dtype": "F16", "shape": [4], "data_offsets": [0, 8]}}
        ).encode()
        (out / f"rank{rank}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))


def build(options: dict[str, Any], quirk: dict[str, Any]) -> None:
    checkpoint = json.loads((Path(options["checkpoint_dir"]) / "config.json").read_text())
    told = json.loads(SNAPSHOT.read_text())["commands"]["trtllm-build"]["options"]
    plugins = {
        name: {"enable": True, "disable": None, "auto": checkpoint["dtype"]}.get(value, value)
        for name, value in options.items()
        if name.endswith("_plugin") or set(told[f"--{name}"].get("choices", ())) == {"enable", "disable"}
    }
    if checkpoint["quantization"]["quant_algo"] != "FP8":  # the real builder switches it off, too
        plugins["use_fp8_context_fmha"] = False
    longest = options["max_seq_len"] or checkpoint["max_position_embeddings"]
    built = {
        **{n: options[n] for n in ("max_batch_size", "max_beam_width", "max_num_tokens", "opt_num_tokens")},
        "max_input_len": min(options["max_input_len"], longest),
        "max_seq_len": longest,
        "kv_cache_type": (options["kv_cache_type"] or "paged").upper(),
        "gather_context_logits": options["gather_context_logits"],
        "max_draft_len": options["max_draft_len"],
        "plugin_config": {**plugins, "tokens_per_block": options["tokens_per_block"]},
    }
    written = {"version": RELEASE, "pretrained_config": checkpoint, "build_config": built}
    out = Path(options["output_dir"])
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(changed(written, quirk)))
    for rank in range(checkpoint["mapping"]["world_size"] - bool(quirk.get("drop_rank"))):
        (out / f"rank{rank}.engine").write_bytes(b"no engine")
    Path(options["output_timing_cache"]).write_bytes(b"no timings")


def changed(tree: dict[str, Any], quirk: dict[str, Any]) -> dict[str, Any]:
    """The tree with the values that a quirk writes instead; null removes a key."""
    for path, value in (quirk.get("change") or {}).items():
        *parents, last = path.split(".")
        at = tree
        for parent in parents:
            at = at[parent]
        if value is None:
            at.pop(last, None)
        else:
            at[last] = value
    return tree


def serve(options: dict[str, Any], quirk: dict[str, Any]) -> None:
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    model = Path(options["MODEL"])
    config = json.loads((model / "config.json").read_text())
    words = int((config.get("pretrained_config") or config)["vocab_size"])
    assert Path(options["extra_llm_api_options"]).is_file()
    assert (Path(options["tokenizer"]) / "tokenizer.json").is_file()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = {"/health": {}, "/v1/models": {"data": [{"id": model.name}]}}.get(self.path)
            self.answer(404 if found is None else 200, found or {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if body.get("stream"):
                self.stream(body)
            else:
                self.answer(200, complete(body, model.name, words, quirk))

        def stream(self, body: dict[str, Any]) -> None:
            """A chunk a token, how many there were, and the end."""
            count = int(body["max_tokens"])
            used = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
            chunks = [{"choices": [{"index": 0, "text": "a", "finish_reason": None}]}] * count
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for chunk in (*chunks, {"choices": [], "usage": used}):
                time.sleep(0.002)
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def answer(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer((options["host"], options["port"]), Handler) as server:
        server.serve_forever()


def complete(body: dict[str, Any], model: str, words: int, quirk: dict[str, Any]) -> dict[str, Any]:
    """An answer of the real one's shape. Greedy decoding of equal logits is word 0, whatever its text."""
    count = body["max_tokens"] - int(quirk.get("tokens_lost", 0))
    rows = len(body["prompt"]) - int(quirk.get("rows_lost", 0))
    choice: dict[str, Any] = {
        "index": 0, "text": "a" * count, "token_ids": None, "logprobs": None, "finish_reason": "length",
        "context_logits": [[0.0] * words for _ in range(rows)] if body.get("return_context_logits") else None,
    }  # fmt: skip
    used = {
        "prompt_tokens": len(body["prompt"]),
        "completion_tokens": count,
        "total_tokens": count + len(body["prompt"]),
    }
    return {"id": "cmpl-1", "object": "text_completion", "model": model, "choices": [choice], "usage": used}
