"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# Machines are shared: how long one example takes says nothing.
settings.register_profile("trainspan", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("trainspan")
