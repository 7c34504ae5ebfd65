"""Placement: offload, quantisation, modulation tables."""
