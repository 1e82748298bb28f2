"""disagg: disaggregated prefill and decode for LLM inference, small enough to read in an afternoon."""
