"""disagg: prefill and decode of LLM inference on different nodes, to be read in an afternoon."""
