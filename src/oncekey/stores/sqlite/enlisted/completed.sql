-- What complete.sql has just written. (SELECT instead of RETURNING, for the SQLite 3.34 of RHEL 9.)
SELECT lease_until, recovery_point, finished_at, expires_at, :now
FROM idempotency_keys
WHERE scope = :scope AND key = :key AND owner = :owner AND state = :to_state
