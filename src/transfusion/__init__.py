"""TransFusion moves a fine-tune onto a new release of its base model, without training or data."""

__version__ = "0.1.0"
