"""The bake-off: estimators of credit against the true advantages of calls, exact or measured by branches."""
