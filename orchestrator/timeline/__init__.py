"""The timeline of a pipeline step: what its stages did, ideally and measured."""
