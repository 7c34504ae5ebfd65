"""Which layout for which machine: what a clip costs in seconds and bytes under every one, without a GPU or torch."""
