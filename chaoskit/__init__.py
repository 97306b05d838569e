"""Break distributed PyTorch training for real, and judge with evidence how it comes back."""
