"""Mode connectivity: curves of low loss, and planes, through the weights of any networks of one architecture."""

from dirprune.connect.curves import (
    BezierCurve,
    CurveProfile,
    FitRecord,
    Plane,
    Profile,
    curve_profile,
    fit_curve,
    plane_profile,
)

__all__ = [
    "BezierCurve",
    "CurveProfile",
    "FitRecord",
    "Plane",
    "Profile",
    "curve_profile",
    "fit_curve",
    "plane_profile",
]
