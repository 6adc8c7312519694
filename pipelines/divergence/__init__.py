"""How far predictions move, token by token, and what moved them: quantization, the engine, or both."""
