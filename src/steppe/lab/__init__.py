"""The lab: data, models, recipes, one training loop, records, statistics, reports. The core does not import it."""
