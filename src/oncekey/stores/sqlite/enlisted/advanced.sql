-- What advance.sql has just written. 0 rows: this attempt does not own the key.
SELECT lease_until FROM idempotency_keys
WHERE scope = :scope AND key = :key AND owner = :owner AND state = 'in_progress' AND recovery_point = :name
