"""The lab: train, compare and draw. It may use packages other than torch."""
