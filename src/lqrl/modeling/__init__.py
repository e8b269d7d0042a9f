"""The packed forward pass that learner and engine share."""
