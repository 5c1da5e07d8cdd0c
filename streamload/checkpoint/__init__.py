"""Reading safetensors checkpoints: headers first, then byte ranges."""
