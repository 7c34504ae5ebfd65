"""How the demo model is made: an endless source of captioned clips, the training of every part, the export."""
