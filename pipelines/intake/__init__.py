"""What comes in from outside: base checkpoints, calibration sets, licences."""
