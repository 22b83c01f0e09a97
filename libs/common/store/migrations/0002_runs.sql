-- Runs that are followed, and their sources.

create table runs (
  run text primary key,
  progress_types text[] not null,
  terminal_types text[] not null,
  stall_after_s double precision not null,
  max_duration_s double precision not null,
  state text not null default 'active'
    check (state in ('active', 'stalled', 'orphaned', 'stopping', 'completed', 'failed', 'stopped', 'expired')),
  reason text,
  created_at timestamptz not null default date_trunc('milliseconds', now()),
  ended_at timestamptz,
  first_seq bigint,                    -- number just before the first event; null until an owner has begun
  last_seq bigint,                     -- number of the last event; null until the end
  epoch bigint not null default 0,     -- the newest minted for a lease
  saved_epoch bigint not null default 0, -- the newest under which an owner has written here: older ones may not
  check ((ended_at is not null) = (state in ('completed', 'failed', 'stopped', 'expired')))
);
create index runs_newest on runs (created_at desc, run desc);
create index runs_open on runs (run) where ended_at is null;
create index runs_ended on runs (ended_at) where ended_at is not null;

create table run_sources (
  run text not null references runs on delete cascade,
  source text not null,
  place integer not null,              -- as given by the caller
  url text not null,
  secrets bytea,                       -- headers, encrypted; written, never shown
  resume text not null check (resume in ('ids', 'replay', 'live')),
  idle_timeout_s double precision not null,
  uid text not null default '',        -- the resume point, behind that beside the stream; used when that is lost
  count bigint not null default 0,
  state text check (state in ('completed', 'failed', 'stopped', 'expired')),
  reason text,
  detail text,
  primary key (run, source)
);
