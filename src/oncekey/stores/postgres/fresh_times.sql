-- The columns of columns.sql for a row that was just inserted: key and times, the rest is known.
k.scope, k.key, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
date_part('epoch', k.lease_until), NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
date_part('epoch', k.created_at), NULL, NULL, date_part('epoch', k.expires_at), date_part('epoch', now())
