"""A personal model as one file to deploy: safetensors, ONNX or torch's .pt2, with all that a user of it must know."""
