"""The OpenAI-compatible server for engines that have none: `python -m pipelines.engine.host ENGINE_DIR`.

Start reading at `decoder.py`, the seam between what speaks HTTP and what runs the model.
"""
