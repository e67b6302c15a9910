"""Why a call is not trained: one named, counted reason each."""
