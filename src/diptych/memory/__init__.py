"""Placement: offload, budgets, quantisation, modulation tables."""
