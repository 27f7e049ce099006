-- The state of an enlisted transaction that the handler ended: 'committed', 'aborted', or 'in progress'.
SELECT txid_status(CAST(%(number)s AS bigint))
