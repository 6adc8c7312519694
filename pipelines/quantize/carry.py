"""Tokenizer, chat template, generation settings and licences go from the base to a variant byte for byte.

Libraries rewrite them on saving (sampling switched on, templates dropped), which changes what is measured.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

CARRIED = re.compile(
    r"tokenizer.*\.json|tokenizer\.model|special_tokens_map\.json|added_tokens\.json|vocab\.json|merges\.txt|"
    r"chat_template\..*|generation_config\.json|preprocessor_config\.json|processor_config\.json|"
    r"(licen[cs]e|notice|use_policy|copying).*",
    re.IGNORECASE,
)


def carry_over(checkpoint: Path, variant: Path) -> list[str]:
    """Replace what a library wrote of these files by the base's own; names that the base lacks are removed."""
    for written in [p for p in variant.iterdir() if CARRIED.fullmatch(p.name)]:
        shutil.rmtree(written) if written.is_dir() else written.unlink()
    carried = sorted(p for p in checkpoint.iterdir() if CARRIED.fullmatch(p.name))
    for source in carried:
        target = variant / source.name
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copyfile(source, target)
    return [p.name for p in carried]
