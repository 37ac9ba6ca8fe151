"""Who owns which element: pure arithmetic over parameter names and shapes, without torch.distributed."""
