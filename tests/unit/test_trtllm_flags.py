"""Flags of a TensorRT-LLM release: what is generated is held to them, and they are read from the tools' own words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from pipelines.config import CONF_DIR
from pipelines.engine.trtllm import flags, helptext, rules, snapshot
from pipelines.engine.trtllm.flags import Option
from pipelines.engine.trtllm.options import Plugins
from pipelines.engine.trtllm.text import yaml_of
from pipelines.engine.trtllm_engine import TrtllmEngineConfig
from pipelines.engine.trtllm_pytorch import TrtllmPytorchConfig
from pipelines.errors import ConfigError, InputError

KNOWN = flags.load("1.2.1")

ARGPARSE = """\
usage: trtllm-build [-h] [--checkpoint_dir CHECKPOINT_DIR] [--max_batch_size N]

options:
  -h, --help            show this help message and exit
  --checkpoint_dir CHECKPOINT_DIR
                        The directory that holds the checkpoint. (default:
                        None)
  --max_batch_size MAX_BATCH_SIZE
                        Requests the engine can schedule. (default: 2048)
  --max_seq_len MAX_SEQ_LEN, --max_decoder_seq_len MAX_SEQ_LEN
                        Total length of one request. (default: None)
  --profiling_verbosity {layer_names_only,detailed,none}
                        Detailed allows inspecting tactics. (default:
                        layer_names_only)
  --alpha ALPHA         A share. (default: 0.5)

Logits arguments:
  --gather_context_logits
                        Enable gathering context logits. (default: False)
  --lora_dir LORA_DIR [LORA_DIR ...]
                        Directories of weights. (default: None)
  -q Q, --quiet Q       How quiet, see --help. (default: 0)
"""
CLICK = """\
Usage: trtllm-serve serve [OPTIONS] MODEL

  Running an OpenAI API compatible server

  MODEL: model name | HF checkpoint path | TensorRT engine path

Options:
  --tokenizer TEXT                Path | Name of the tokenizer.
  --host TEXT                     Hostname of the server.  [default: localhost]
  --port INTEGER                  Port of the server.  [default: 8000]
  --backend [pytorch|tensorrt|_autodeploy]
                                  The backend to use to serve the model.
  --tp_size, --tensor_parallel_size INTEGER
                                  Tensor parallelism size.
  --kv_cache_free_gpu_memory_fraction FLOAT
                                  Free GPU memory fraction.
  --trust_remote_code             Flag for HF transformers.
  --telemetry / --no-telemetry    Report usage.
  --help                          Show this message and exit.
"""


def told(name: str, *argv: str) -> str:
    return "\n".join(map(str, flags.argv_problems(KNOWN, name, argv)))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--max_batchsize", "8"], "no such option in 1.2.1 (did you mean '--max_batch_size'?)"),
        (["--max_num_tokens", "many"], "--max_num_tokens='many': is no int"),
        (["--gemm_plugin", "fp16"], "--gemm_plugin='fp16': not among its choices"),
        (["--workers"], "--workers=None: needs a value"),
        (["--gather_context_logits=yes"], "takes no value"),
        (["--workers", "1", "--workers", "2"], "given twice"),
        (["engine"], "takes 0 arguments by place (none)"),
        (["--multiple_profiles", "true"], "allowed: disable, enable"),
    ],
)
def test_a_command_line_that_the_release_would_refuse_is_told(argv: list[str], said: str) -> None:
    """Unknown flags, wrong types, values not among choices, missing values."""
    assert said in told("trtllm-build", *argv)


def test_a_command_line_that_it_takes_is_not() -> None:
    """Aliases, values after =, negative numbers and several values are understood."""
    argv = ["--max_decoder_seq_len", "4096", "--max_num_tokens=8192", "--lora_dir", "a", "b", "--strip_plan"]
    assert "" == told("trtllm-build", *argv)
    assert "" == told("convert_checkpoint.py", "--moe_tp_size", "-1", "-sq", "0.5")
    assert "" == told("trtllm-serve", "engine", "--kv_cache_free_gpu_memory_fraction", "0.8")


def test_all_mistakes_of_a_command_line_come_at_once() -> None:
    """One look, every mistake; a value of an unknown option is not taken for an argument."""
    found = flags.argv_problems(KNOWN, "trtllm-serve", ["--nope", "1", "--port", "x", "--backend", "trt_llm"])
    assert ["trtllm-serve --nope", "trtllm-serve --port", "trtllm-serve --backend", "trtllm-serve"] == [
        p.key for p in found
    ]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_cache_config": {"enable_blok_reuse": False}}, "did you mean 'enable_block_reuse'?"),
        ({"kv_cache_config": {"free_gpu_memory_fraction": 1.5}}, "is above 1"),
        ({"kv_cache_config": {"max_attention_window": [128, "x"]}}, "max_attention_window[1]='x': is no integer"),
        ({"stream_interval": 0}, "is below 1"),
        ({"disable_overlap_scheduler": 1}, "is no boolean"),
        ({"moe_config": {"backend": "CUTLAS"}}, "did you mean 'CUTLASS'?"),
        ({"attn_backend": None}, "cannot be null"),
        ({"tensor_parallel_size": True}, "is no integer"),
    ],
)
def test_settings_that_the_release_would_refuse_are_told(settings: dict[str, Any], said: str) -> None:
    """Its models forbid unknown fields, so a typo would end the server at start."""
    assert said in "\n".join(map(str, flags.settings_problems(KNOWN, "TorchLlmArgs", settings)))


def test_settings_that_it_takes_are_not() -> None:
    """null where a field may be unset."""
    given_settings = {"cuda_graph_config": None, "kv_cache_config": {"max_tokens": None}, "max_seq_len": 2048}
    assert [] == flags.settings_problems(KNOWN, "TorchLlmArgs", given_settings)


def test_a_kernel_that_would_be_another_one_is_refused() -> None:
    """The library takes an attention it does not know for its own, without a word."""
    with pytest.raises(ValidationError, match="'TRTLLM', 'FLASHINFER' or 'VANILLA'"):
        TrtllmPytorchConfig.model_validate({"attn_backend": "flashinfer"})


def test_every_plugin_option_is_the_builder_s_own() -> None:
    """Names and choices of the configuration are those of the snapshot."""
    options = KNOWN.commands["trtllm-build"].options
    schema = Plugins.model_json_schema()["properties"]
    for name, field in schema.items():
        allowed = {c for branch in field["anyOf"] for c in branch.get("enum", [])}
        assert allowed <= set(options[f"--{name}"].choices) or name == "tokens_per_block"


@pytest.mark.parametrize("model", [TrtllmEngineConfig, TrtllmPytorchConfig])
def test_shipped_configurations_say_every_option(model: type[BaseModel]) -> None:
    """conf/engine has each key, so that nobody has to read the source; all but scoring are the tool's defaults."""
    name = str(model.model_fields["target"].default)
    shipped = yaml.safe_load((CONF_DIR / "engine" / f"{name}.yaml").read_text())
    assert "trtllm" == shipped.pop("toolchain")
    assert set(model.model_fields) == set(shipped)
    assert (set(Plugins.model_fields) if "plugins" in shipped else set()) == set(shipped.get("plugins", {}))
    changed = {k for k in shipped if getattr(model.model_validate(shipped), k) != model.model_fields[k].default}
    assert changed <= {"gather_context_logits", "context_logits", "kv_cache"}


def test_a_release_without_a_snapshot_is_told_how_to_make_one(tmp_path: Path) -> None:
    """And a file of another release, or none at all, is one clear error."""
    with pytest.raises(InputError, match=r"pipelines\.engine\.trtllm\.snapshot"):
        flags.load("1.9.9")
    other = tmp_path / "flags.json"
    other.write_text(flags.SHIPPED["1.2.1"].read_text())
    with pytest.raises(InputError, match=r"is of TensorRT-LLM 1\.2\.1, not 1\.3\.0"):
        flags.load("1.3.0", str(other))
    other.write_text("{")
    with pytest.raises(InputError, match="not a readable flag snapshot"):
        flags.load("1.3.0", str(other))
    other.write_text('{"release": "1.3.0"}')
    with pytest.raises(ConfigError, match="missing"):
        flags.load("1.3.0", str(other))


def test_releases_sort_by_number_and_candidates_before_their_release() -> None:
    """1.3.0rc15 < 1.3.0rc22 < 1.3.0 < 1.10.0."""
    names = ["1.10.0", "1.3.0", "1.3.0rc22", "1.2.1", "1.3.0rc15"]
    assert ["1.2.1", "1.3.0rc15", "1.3.0rc22", "1.3.0", "1.10.0"] == sorted(names, key=rules.order)


def test_argparse_help_is_read() -> None:
    """Types come from defaults, choices from braces, flags from having neither value nor metavar."""
    read = helptext.of_argparse(ARGPARSE).options
    assert {
        "--checkpoint_dir": Option(type="str"),
        "--max_batch_size": Option(type="int", default=2048),
        "--max_seq_len": Option(type="str", aliases=("--max_decoder_seq_len",)),
        "--profiling_verbosity": Option(
            type="str", choices=("layer_names_only", "detailed", "none"), default="layer_names_only"
        ),
        "--alpha": Option(type="float", default=0.5),
        "--gather_context_logits": Option(type="flag"),
        "--lora_dir": Option(type="str", many=True),
        "--quiet": Option(type="int", default=0, aliases=("-q",)),
    } == read


def test_newer_argparse_help_is_read_alike() -> None:
    """Python 3.13 writes the metavar of several names once, at the end."""
    newer = ARGPARSE.replace("--max_seq_len MAX_SEQ_LEN, ", "--max_seq_len, ").replace("-q Q, --quiet", "-q, --quiet")
    assert helptext.of_argparse(ARGPARSE) == helptext.of_argparse(newer)


def test_click_help_is_read() -> None:
    """Metavars say types, brackets choices, and the usage line the arguments by place."""
    read = helptext.of_click(CLICK)
    assert ("MODEL",) == read.positionals
    assert {
        "--tokenizer": Option(type="str"),
        "--host": Option(type="str", default="localhost"),
        "--port": Option(type="int", default=8000),
        "--backend": Option(type="str", choices=("pytorch", "tensorrt", "_autodeploy")),
        "--tp_size": Option(type="int", aliases=("--tensor_parallel_size",)),
        "--kv_cache_free_gpu_memory_fraction": Option(type="float"),
        "--trust_remote_code": Option(type="flag"),
        "--telemetry": Option(type="flag", aliases=("--no-telemetry",)),
    } == read.options


class Cache(BaseModel):
    """A nested model, as the library has them."""

    reuse: bool = True
    fraction: float | None = None


class Args(BaseModel):
    """A model that also holds itself."""

    size: int = 1
    cache: Cache = Cache()
    mode: str | None = None
    windows: list[int] | None = None
    draft: Args | None = None


def test_a_pydantic_schema_is_read_with_its_references() -> None:
    """Optional fields may be null, nested models are followed, one that holds itself ends."""
    node = helptext.of_schema(Args.model_json_schema())
    cache, draft = node.properties["cache"], node.properties["draft"]
    assert ("object", "boolean", "number", True) == (
        cache.type, cache.properties["reuse"].type, cache.properties["fraction"].type, cache.properties["fraction"].null
    )  # fmt: skip
    windows = node.properties["windows"]
    assert ("array", True, "integer") == (windows.type, windows.null, windows.items.type if windows.items else None)
    assert draft.null


def test_a_snapshot_is_made_of_captured_texts_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag more, one less and a changed default are told; types that help does not say are kept."""
    text = ARGPARSE.replace("(default: 2048)", "(default: 256)").replace("--alpha ALPHA ", "--brand_new NEW ")
    (tmp_path / "trtllm-build.txt").write_text(text)
    (tmp_path / "trtllm-serve.txt").write_text(CLICK)
    (tmp_path / "TorchLlmArgs.json").write_text("[TensorRT-LLM] hello\n" + json.dumps(Args.model_json_schema()))
    out = tmp_path / "flags.json"
    code = snapshot.main(["--release", "1.3.0rc15", "--captured", str(tmp_path), "--out", str(out)])
    said = capsys.readouterr().out.splitlines()
    assert 1 == code
    assert "~ trtllm-build --max_batch_size: default 2048 -> 256" in said
    assert "+ trtllm-build --brand_new" in said
    assert "- trtllm-build --workers" in said
    assert "- convert_checkpoint.py: is gone" in said
    assert "- TorchLlmArgs.kv_cache_config" in said and "+ TorchLlmArgs.cache" in said
    made = flags.load("1.3.0rc15", str(out))
    assert "int" == made.commands["trtllm-build"].options["--max_seq_len"].type


def test_a_snapshot_that_did_not_change_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The shipped one, written as help, is read back without a difference."""
    command = KNOWN.commands["trtllm-serve"]
    metavars = {"int": "INTEGER", "float": "FLOAT", "str": "TEXT", "flag": ""}
    lines = ["Usage: trtllm-serve [OPTIONS] MODEL", "", "Options:"]
    for name, option in command.options.items():
        shown = f"[{'|'.join(option.choices)}]" if option.choices else metavars[option.type]
        lines += [f"  {name} {shown}".rstrip(), "                                  Help."]
    (tmp_path / "trtllm-serve.txt").write_text("\n".join(lines) + "\n")
    snapshot.main(["--release", "1.2.1", "--captured", str(tmp_path)])
    assert not [line for line in capsys.readouterr().out.splitlines() if line.startswith(("~", "+"))]


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    """No prefix and no files is a mistake, not an empty snapshot."""
    with pytest.raises(InputError, match="nothing was captured"):
        snapshot.main(["--release", "1.2.1", "--captured", str(tmp_path)])
    (tmp_path / "trtllm-build.txt").write_text("Traceback (most recent call last): no GPU\n")
    with pytest.raises(InputError, match="no options are told"):
        snapshot.main(["--release", "1.2.1", "--captured", str(tmp_path)])


names = st.text(min_size=1, max_size=200)  # YAML reads no key of more than 1024 characters
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
trees = st.recursive(
    st.dictionaries(names, scalars | st.lists(scalars, max_size=3), max_size=4),
    lambda inner: st.dictionaries(names, inner | scalars, max_size=4),
    max_leaves=8,
)


@given(trees)
def test_settings_are_yaml_that_reads_back_equal(tree: dict[str, Any]) -> None:
    """Whatever the keys and values: on, 1e-05, colons, quotes, line ends."""
    assert tree == yaml.safe_load(yaml_of(tree, "one\ntwo"))
