"""The lab: data, models, recipes, one training loop, records, statistics, reports. The core never imports it."""
