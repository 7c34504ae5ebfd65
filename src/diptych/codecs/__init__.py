"""Text, image, video and audio in and out of latents."""
