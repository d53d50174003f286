"""Mode connectivity: curves of low loss, and planes, through the weights of any networks of one architecture.

Two solutions lie in one valley if a curve joins them along which the loss does not rise. `BezierCurve` is the curve,
`fit_curve` bends it into the valley, and `curve_profile` and `plane_profile` measure the loss along it and around it.

Reference: Garipov et al., "Loss surfaces, mode connectivity, and fast ensembling of DNNs", NeurIPS 2018.
"""

from dirprune.connect.curve import BezierCurve, Plane
from dirprune.connect.fit import FitRecord, fit_curve
from dirprune.connect.profile import CurveProfile, Profile, curve_profile, plane_profile

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
