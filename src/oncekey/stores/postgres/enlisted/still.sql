-- Whether this is still the transaction that was enlisted.
SELECT current_setting('oncekey.owner', true) = CAST(:owner AS text)
