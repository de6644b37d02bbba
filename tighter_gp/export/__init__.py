"""A trained model as a plain module, for torch.export, TorchScript and ONNX."""

from .predictor import ExportedPredictor, export_predictor

__all__ = ["ExportedPredictor", "export_predictor"]
