"""A peer's personal model as one file: safetensors, ONNX or torch's .pt2, with the metadata needed
to use it."""
