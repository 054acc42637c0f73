"""A run's report: what its rows say, as one HTML file, as Markdown and as JSON, with its pictures as SVG and CSV."""
