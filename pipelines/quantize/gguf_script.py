"""llama.cpp's converter as a program of its own, for tokenizers whose rule it does not list.

It tells how texts are cut into words by the ids that a sample text gets, and gives up on a vocabulary that it has not
seen. Where tokenizer.json itself says that the rule is GPT-2's, that is the name for it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RULE = "gpt-2"


def cuts_as_gpt2(tokenizer_file: Path) -> bool:
    """Whether a tokenizer cuts texts into words by GPT-2's expression and nothing else."""
    rule = (json.loads(tokenizer_file.read_text()) if tokenizer_file.is_file() else {}).get("pre_tokenizer") or {}
    return rule.get("type") == "ByteLevel" and bool(rule.get("use_regex", True)) and not rule.get("add_prefix_space")


def main() -> None:
    """Run the converter that lies in the directory named first, with the arguments after it."""
    where = sys.argv.pop(1)
    sys.path.insert(0, where)
    import convert_hf_to_gguf  # type: ignore[import-not-found]
    from conversion.base import TextModel  # type: ignore[import-not-found]

    listed = TextModel.get_vocab_base_pre

    def named(model: Any, tokenizer: Any) -> str:
        try:
            return str(listed(model, tokenizer))
        except NotImplementedError:
            if cuts_as_gpt2(Path(model.dir_model) / "tokenizer.json"):
                return RULE
            raise

    TextModel.get_vocab_base_pre = named
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
