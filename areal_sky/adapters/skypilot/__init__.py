"""The door to SkyPilot: the only package that imports `sky`, lazily, and only in the controller's process.

`requests` calls the SDK and speaks in our own values, `errors` translates what it raises, `cloud` is `ports.Cloud`
over them, and `offers` reads its catalogs.
"""
