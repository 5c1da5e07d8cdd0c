"""Loads: options, preparation, `load_state_dict`, `plan`, `iterate`, reports."""
