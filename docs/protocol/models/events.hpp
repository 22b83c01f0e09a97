// The event path (rules 21 to 29). One run with one or two upstream sources, two relays, and a reader that
// remembers only its cursor from one gateway to the next. Entry ids are (epoch, seq), given by the relay; Redis refuses
// ids that do not grow. The stream may be trimmed, flushed, or failed over to a replica that lags.
#pragma once

#include <cstdlib>

#include "checker.hpp"

enum EntryKind : uint8_t { NO_ENTRY, EVENT, MARKER, DISCONTINUITY };
enum Phase : uint8_t { IDLE, LEASED, OWNER, DEAD = 4 };  // LEASED: has not fenced yet
enum Resume : uint8_t { BY_IDS, REPLAYS, LIVE_ONLY };
enum Birth : uint8_t { AT_ZERO, AT_POSTGRES, AT_TIME, AT_EPOCH };  // where seq starts in an empty stream
enum Arithmetic : uint8_t { NO_GAPS, GAP_IF_GREATER, GAP_UNLESS_SUCCESSOR };
enum Violation : uint8_t { NO_VIOLATION, REPEATED, HOLE };

constexpr int ENTRIES_MAX = 12;
constexpr int SOURCES_MAX = 2;
constexpr int BATCH_MAX = 2;
constexpr int RELAYS = 2;
constexpr int TIME_MAX = 11;
constexpr int SEQ_PER_TICK = 8;  // more than are ever numbered in one

struct Events {
  struct Entry {
    uint16_t epoch : 4, seq : 7, kind : 2, source : 1, number : 2;
  };
  struct Relay {
    uint8_t phase, frozen, epoch, seq;
    uint8_t upstream_open, last[SOURCES_MAX], reads[SOURCES_MAX];  // last number it has; next number upstream sends
    uint8_t batched, batch[BATCH_MAX];                             // source * 8 + number
    uint8_t unknown;                                               // the outcome of its last append
    uint8_t owes_discontinuity;
  };
  struct State {
    Entry entry[ENTRIES_MAX];
    uint8_t entries, tail_epoch, tail_seq, resume[SOURCES_MAX];  // all in Redis, lost together
    uint8_t lease_holder, lease_epoch;                           // relay + 1; 0: nobody
    uint8_t time, last_birth;
    uint8_t pg_resume[SOURCES_MAX], pg_seq;  // now and then
    uint8_t emitted[SOURCES_MAX];
    // The reader: its cursor, the position from which the gateway reads, and what it has seen.
    uint8_t cursor_epoch, cursor_seq, has_cursor, at_epoch, at_seq;
    uint8_t seen[SOURCES_MAX], gap[SOURCES_MAX], violation, needless_gap;
    uint8_t lossy;  // something may be missing, so a gap is no false alarm
    uint8_t faults, flushes, trims, fail_overs, expiries, kills, freezes, drops, lost_replies, half_appends;  // left
    Relay relay[RELAYS];
  };

  struct Options {
    int sources = 1, events = 2;
    Resume how = BY_IDS;
    bool resume_points_kept = true;                // rule 22; else only what the tail entry says
    bool marker_repeats_seq = true;                // rule 21; else it takes a number of its own
    Birth birth = AT_TIME;                         // rule 21
    Arithmetic arithmetic = GAP_UNLESS_SUCCESSOR;  // rule 26, as are the next three
    bool marker_rule = true, cursor_beyond_is_gap = true, first_seq_known = true;
    bool reader_drops_old = false;           // against rule 27
    bool append_checks_lease = false;        // not needed
    bool owner_puts_lease_back = true;       // rule 25; else it stops
    bool discontinuity_after_reopen = true;  // rule 28
    bool append_compares_tail = true;        // rules 23 and 25
    bool acquire_in_one_script = true;       // rule 22
    bool clock_back = false;                 // with a flush
    bool epoch_in_postgres = false;          // rule 14
    bool no_repeat_after_gap = false;        // asks too much
    int faults = 3, flushes = 1, trims = 1, fail_overs = 1, expiries = 1, kills = 1, freezes = 1, drops = 1,
        lost_replies = 1, half_appends = 0;
  } o;

  State first() const {
    State s{};
    s.faults = o.faults;
    s.flushes = o.flushes;
    s.trims = o.trims;
    s.fail_overs = o.fail_overs;
    s.expiries = o.expiries;
    s.kills = o.kills;
    s.freezes = o.freezes;
    s.drops = o.drops;
    s.lost_replies = o.lost_replies;
    s.half_appends = o.half_appends;
    if (o.first_seq_known) {
      s.has_cursor = 1;
      s.cursor_seq = o.birth >= AT_TIME ? SEQ_PER_TICK : 0;
    }
    if (o.how == LIVE_ONLY) s.lossy = 1;
    return s;
  }

  void canonical(State&) const {}

  static bool may(const State& s, uint8_t State::* budget) { return s.*budget && s.faults; }
  static void use(State& n, uint8_t State::* budget) {
    n.*budget -= 1;
    n.faults--;
  }
  static bool less(int epoch, int seq, int other_epoch, int other_seq) {
    return epoch < other_epoch || (epoch == other_epoch && seq < other_seq);
  }

  // ---- the stream

  // XADD with an explicit id.
  static bool append(State& n, int epoch, int seq, EntryKind kind, int source, int number) {
    if (!less(n.tail_epoch, n.tail_seq, epoch, seq)) return false;
    if (n.entries == ENTRIES_MAX) {
      fprintf(stderr, "ENTRIES_MAX is too small for this variant\n");
      exit(3);
    }
    Entry& e = n.entry[n.entries++];
    e.epoch = epoch;
    e.seq = seq;
    e.kind = kind;
    e.source = source;
    e.number = number;
    n.tail_epoch = epoch;
    n.tail_seq = seq;
    if (kind == EVENT) n.resume[source] = number;
    return true;
  }

  static void reset(Relay& r) {
    const uint8_t frozen = r.frozen;
    r = {};
    r.frozen = frozen;
  }

  static int mint(State& n) {
    n.time = std::max(n.time, n.tail_epoch) + 1;
    return n.time;
  }

  // The fence script: refuse, or mark above the tail and return it with the resume points.
  bool fence(State& n, int i) const {
    Relay& r = n.relay[i];
    if (n.tail_epoch > r.epoch) return false;
    if (n.tail_epoch == 0) {  // born empty
      if (o.birth == AT_TIME) {
        n.last_birth = std::max<uint8_t>(n.time, n.last_birth + 1);
        n.time = std::max(n.time, n.last_birth);
      }
      r.seq = o.birth == AT_TIME    ? n.last_birth * SEQ_PER_TICK
              : o.birth == AT_EPOCH ? r.epoch * SEQ_PER_TICK
              : o.birth == AT_ZERO  ? 0
                                    : n.pg_seq;
      for (int x = 0; x < SOURCES_MAX; x++) r.last[x] = n.pg_resume[x];
      if (!append(n, r.epoch, r.seq, MARKER, 0, 0)) return false;
      // In two scripts an owner may have died between them: a needless gap is possible.
      if (!o.acquire_in_one_script && n.last_birth > 1) n.lossy = 1;
    } else {
      r.seq = n.tail_seq;
      for (int x = 0; x < SOURCES_MAX; x++) r.last[x] = o.resume_points_kept ? n.resume[x] : 0;
      if (!o.resume_points_kept)
        for (int k = n.entries - 1; k >= 0; k--)
          if (n.entry[k].kind == EVENT) {
            r.last[n.entry[k].source] = n.entry[k].number;
            break;
          }
      if (!o.marker_repeats_seq) r.seq++;
      if (!append(n, r.epoch, r.seq, MARKER, 0, 0)) return false;
    }
    r.phase = OWNER;
    return true;
  }

  void acquire(State& n, int i) const {
    Relay& r = n.relay[i];
    r.phase = LEASED;
    r.epoch = mint(n);
    n.lease_holder = i + 1;
    n.lease_epoch = r.epoch;
  }

  // ---- steps

  void next(const State& s, Steps<State>& out) const {
    for (int x = 0; x < o.sources; x++)
      if (s.emitted[x] < o.events)
        out.step(PROMPT, "upstream %d emits its event %d", x, s.emitted[x] + 1, [&](State& n) { n.emitted[x]++; });
    for (int i = 0; i < RELAYS; i++) run_relay(s, i, out);
    lose(s, out);
    read(s, out);
  }

  void run_relay(const State& s, int i, Steps<State>& out) const {
    const Relay& r = s.relay[i];
    if (r.phase == DEAD) {
      out.step(PROMPT, "relay %d starts again", i, [&](State& n) { reset(n.relay[i]); });
      return;
    }
    if (r.frozen) {
      out.step(PROMPT, "relay %d wakes", i, [&](State& n) { n.relay[i].frozen = 0; });
      return;
    }
    if (r.phase != IDLE && may(s, &State::kills))
      out.step(FAULT, "relay %d KILLED", i, [&](State& n) {
        use(n, &State::kills);
        n.relay[i] = {};
        n.relay[i].phase = DEAD;
      });
    if (r.phase != IDLE && may(s, &State::freezes))
      out.step(FAULT, "relay %d FREEZES", i, [&](State& n) {
        use(n, &State::freezes);
        n.relay[i].frozen = 1;
      });
    if (r.phase == IDLE && !s.lease_holder && s.time < TIME_MAX)
      out.step(PROMPT, "relay %d takes the lease", i, [&](State& n) {
        acquire(n, i);
        if (!o.acquire_in_one_script || fence(n, i)) return;
        reset(n.relay[i]);
        n.lease_holder = 0;
      });
    if (r.phase == LEASED)
      out.step(PROMPT, "relay %d: fence script (mark, read tail), epoch %d", i, r.epoch, [&](State& n) {
        if (fence(n, i)) return;
        reset(n.relay[i]);
        if (s.lease_holder == i + 1) n.lease_holder = 0;
      });
    if (r.phase == OWNER) own(s, i, out);
  }

  void own(const State& s, int i, Steps<State>& out) const {
    const Relay& r = s.relay[i];
    if (s.lease_holder && s.lease_holder != i + 1)
      out.step(PROMPT, "relay %d sees that the lease is another's: stops", i, [&](State& n) { reset(n.relay[i]); });
    if (!s.lease_holder)
      out.step(
          PROMPT,
          o.owner_puts_lease_back ? "relay %d: lease gone, nobody has it: puts it back" : "relay %d: lease gone: stops",
          i, [&](State& n) {
            if (!o.owner_puts_lease_back || s.tail_epoch > r.epoch) {
              reset(n.relay[i]);
              return;
            }
            n.lease_holder = i + 1;
            n.lease_epoch = r.epoch;
          });
    read_upstream(s, i, out);
    if (o.append_compares_tail && s.tail_epoch > r.epoch)
      out.step(PROMPT, "relay %d: lease refresh finds a newer epoch at the tail: stops, releases", i, [&](State& n) {
        reset(n.relay[i]);
        if (s.lease_holder == i + 1) n.lease_holder = n.lease_epoch = 0;
      });
    const bool tail_behind = less(s.tail_epoch, s.tail_seq, r.epoch, r.seq);  // flushed or failed over
    if (o.append_compares_tail && tail_behind) {
      if ((!s.lease_holder || s.lease_holder == i + 1) && s.time < TIME_MAX)
        out.step(PROMPT, "relay %d finds the tail behind its own: new epoch, fences again, reopens", i, [&](State& n) {
          reset(n.relay[i]);
          acquire(n, i);
          if (fence(n, i)) return;
          reset(n.relay[i]);
          n.lease_holder = 0;
        });
      return;
    }
    if (r.owes_discontinuity || r.batched) append_batch(s, i, out);
    if (!r.batched && (s.pg_resume[0] != r.last[0] || s.pg_resume[1] != r.last[1]))
      out.step(PROMPT, "relay %d: resume point to Postgres", i, [&](State& n) {
        for (int x = 0; x < SOURCES_MAX; x++) n.pg_resume[x] = r.last[x];
        n.pg_seq = r.seq;
      });
  }

  void read_upstream(const State& s, int i, Steps<State>& out) const {
    const Relay& r = s.relay[i];
    if (!r.upstream_open)
      out.step(PROMPT, "relay %d opens upstream", i, [&](State& n) {
        Relay& q = n.relay[i];
        q.upstream_open = 1;
        for (int x = 0; x < o.sources; x++)
          q.reads[x] = o.how == BY_IDS ? q.last[x] + 1 : o.how == REPLAYS ? 1 : s.emitted[x] + 1;
        if (o.how != LIVE_ONLY) return;
        q.owes_discontinuity = o.discontinuity_after_reopen;
        n.lossy = 1;
      });
    if (r.upstream_open && may(s, &State::drops))
      out.step(FAULT, "relay %d: upstream connection DROPS", i, [&](State& n) {
        use(n, &State::drops);
        n.relay[i].upstream_open = 0;
      });
    if (!r.upstream_open || r.unknown) return;
    for (int x = 0; x < o.sources; x++)
      if (r.reads[x] <= s.emitted[x] && r.batched < BATCH_MAX && !r.owes_discontinuity)
        out.step(PROMPT, "relay %d reads upstream event %d", i, r.reads[x], [&](State& n) {
          Relay& q = n.relay[i];
          const uint8_t number = q.reads[x]++;
          if (number <= q.last[x]) return;
          q.batch[q.batched++] = x * 8 + number;
          q.last[x] = number;
        });
  }

  enum How { KNOWN, REPLY_LOST, HALF_APPLIED };

  // The append script. With an unknown outcome the batch stays, and is tried again under the same ids (rule 24).
  void append_batch(const State& s, int i, Steps<State>& out) const {
    const Relay& r = s.relay[i];
    const bool refused = s.tail_epoch > r.epoch || (o.append_checks_lease && s.lease_holder && s.lease_holder != i + 1);
    // What was read before the cut comes first, under its old numbers.
    const bool discontinuity = r.owes_discontinuity && !r.batched;
    auto apply = [&](State& n, How how) {
      Relay& q = n.relay[i];
      if (refused) {
        reset(q);
        return;
      }
      if (discontinuity) append(n, r.epoch, r.seq + 1, DISCONTINUITY, 0, 0);
      const int count = how == HALF_APPLIED ? 1 : r.batched;
      for (int k = 0; k < count; k++)  // ids that are there are skipped
        append(n, r.epoch, r.seq + 1 + k, EVENT, r.batch[k] / 8, r.batch[k] % 8);
      q.unknown = how != KNOWN;
      if (how != KNOWN) return;
      q.seq += discontinuity ? 1 : r.batched;
      if (discontinuity) q.owes_discontinuity = 0;
      q.batched = q.batch[0] = q.batch[1] = 0;
    };
    auto step = [&](Kind kind, const char* label, How how, uint8_t State::* budget) {
      out.step(kind, refused ? "relay %d: append REFUSED: stops" : label, i, [&](State& n) {
        if (budget) use(n, budget);
        apply(n, how);
      });
    };
    step(PROMPT, discontinuity ? "relay %d appends a discontinuity" : "relay %d appends its batch", KNOWN, nullptr);
    if (may(s, &State::lost_replies)) step(FAULT, "relay %d appends, REPLY LOST", REPLY_LOST, &State::lost_replies);
    if (may(s, &State::half_appends) && r.batched == BATCH_MAX)
      step(FAULT, "relay %d: append HALF applied, reply lost", HALF_APPLIED, &State::half_appends);
  }

  void lose(const State& s, Steps<State>& out) const {
    bool healthy = false;
    if (s.lease_holder) {
      const Relay& r = s.relay[s.lease_holder - 1];
      healthy = r.phase != IDLE && r.phase != DEAD && !r.frozen && r.epoch == s.lease_epoch;
    }
    if (s.lease_holder && (!healthy || may(s, &State::expiries)))
      out.step(healthy ? FAULT : SLOW, "the lease of relay %d expires", s.lease_holder - 1, [&](State& n) {
        if (healthy) use(n, &State::expiries);
        n.lease_holder = n.lease_epoch = 0;
      });
    if (s.entries > 1 && may(s, &State::trims))
      out.step(FAULT, "oldest entry TRIMMED", [](State& n) {
        use(n, &State::trims);
        n.lossy = 1;
        for (int k = 1; k < n.entries; k++) n.entry[k - 1] = n.entry[k];
        n.entry[--n.entries] = {};
      });
    if (s.tail_epoch && may(s, &State::flushes))
      out.step(FAULT, "Redis FLUSHED", [&](State& n) {
        use(n, &State::flushes);
        n.lossy = 1;
        memset(n.entry, 0, sizeof n.entry);
        n.entries = n.tail_epoch = n.tail_seq = n.resume[0] = n.resume[1] = n.lease_holder = n.lease_epoch = 0;
        if (o.clock_back && !o.epoch_in_postgres) n.time = n.last_birth = 0;
      });
    if (s.entries && may(s, &State::fail_overs))
      out.step(FAULT, "FAIL-OVER: the last entry was not replicated", [](State& n) {
        use(n, &State::fail_overs);
        n.lossy = 1;
        const Entry lost = n.entry[n.entries - 1];
        n.entry[--n.entries] = {};
        if (lost.kind == EVENT) {
          n.resume[lost.source] = lost.number - 1;
          for (int k = 0; k < n.entries; k++)
            if (n.entry[k].kind == EVENT && n.entry[k].source == lost.source) n.resume[lost.source] = n.entry[k].number;
        }
        if (n.entries) {
          n.tail_epoch = n.entry[n.entries - 1].epoch;
          n.tail_seq = n.entry[n.entries - 1].seq;
        } else {
          n.tail_epoch = n.tail_seq = n.resume[0] = n.resume[1] = 0;
        }
      });
  }

  // ---- the reader

  static void announce_gap(State& n) {
    n.gap[0] = n.gap[1] = 1;
    if (!n.lossy) n.needless_gap = 1;
  }
  static void move_cursor(State& n, int epoch, int seq) {
    n.cursor_epoch = epoch;
    n.cursor_seq = seq;
  }

  void read(const State& s, Steps<State>& out) const {
    if (s.at_epoch != s.cursor_epoch || s.at_seq != s.cursor_seq)
      out.step(PROMPT, "reader reconnects elsewhere with its cursor", [&](State& n) {
        n.at_epoch = s.cursor_epoch;
        n.at_seq = s.cursor_seq;
      });
    if (o.cursor_beyond_is_gap && s.tail_epoch && less(s.tail_epoch, s.tail_seq, s.at_epoch, s.at_seq))
      out.step(PROMPT, "reader: cursor beyond the stream: GAP", [&](State& n) {
        announce_gap(n);
        const bool reborn =
            s.entries && s.entry[0].kind == MARKER && s.entry[0].epoch < s.at_epoch && s.tail_epoch < s.at_epoch;
        if (reborn) n.has_cursor = 0;
        move_cursor(n, reborn ? 0 : s.tail_epoch, reborn ? 0 : s.tail_seq);
        n.at_epoch = n.cursor_epoch;
        n.at_seq = n.cursor_seq;
      });
    for (int k = 0; k < s.entries; k++) {
      const Entry& e = s.entry[k];
      if (!less(s.at_epoch, s.at_seq, e.epoch, e.seq)) continue;
      if (e.kind == MARKER)
        pass_marker(s, e, out);
      else
        pass_event(s, e, out);
      return;
    }
  }

  void pass_marker(const State& s, const Entry& e, Steps<State>& out) const {
    out.step(PROMPT, "reader passes a marker (seq %d)", e.seq, [&](State& n) {
      n.at_epoch = e.epoch;
      n.at_seq = e.seq;
      if (!o.marker_rule || !s.has_cursor || e.seq == s.cursor_seq) return;
      announce_gap(n);
      move_cursor(n, e.epoch, e.seq);
    });
  }

  void pass_event(const State& s, const Entry& e, Steps<State>& out) const {
    const bool dropped = o.reader_drops_old && s.has_cursor && e.seq <= s.cursor_seq;
    const bool gap = s.has_cursor && !dropped &&
                     ((o.arithmetic == GAP_UNLESS_SUCCESSOR && e.seq != s.cursor_seq + 1) ||
                      (o.arithmetic == GAP_IF_GREATER && e.seq > s.cursor_seq + 1));
    out.step(PROMPT,
             dropped                   ? "reader drops an old number (upstream event %d)"
             : gap                     ? "reader: GAP, then upstream event %d (seq %d)"
             : e.kind == DISCONTINUITY ? "reader: discontinuity"
                                       : "reader delivers upstream event %d (seq %d)",
             e.number, e.seq, [&](State& n) {
               n.at_epoch = e.epoch;
               n.at_seq = e.seq;
               if (gap) announce_gap(n);
               if (dropped) return;
               move_cursor(n, e.epoch, e.seq);
               n.has_cursor = 1;
               if (e.kind == DISCONTINUITY) {
                 announce_gap(n);
                 return;
               }
               const int x = e.source;
               if (e.number <= s.seen[x] && (!n.gap[x] || o.no_repeat_after_gap)) n.violation = REPEATED;
               if (e.number > s.seen[x] + 1 && !n.gap[x]) n.violation = HOLE;
               if (e.number > s.seen[x] || n.gap[x]) n.seen[x] = e.number;
               n.gap[x] = 0;
             });
  }

  // ---- claims

  static constexpr const char* NO_REPEAT = "no duplicate or reordering, unless after an announced gap";
  static constexpr const char* NO_HOLE = "no silent hole";
  static constexpr const char* NO_NEEDLESS_GAP = "no gap announced where nothing was lost";

  Claims<State> claims() const {
    return {
        {
            {NO_REPEAT, [](const State& s) { return s.violation != REPEATED; }},
            {NO_HOLE, [](const State& s) { return s.violation != HOLE; }},
            {NO_NEEDLESS_GAP, [](const State& s) { return !s.needless_gap; }},
        },
        [this](const State& s) { return has_all(s); },
        false,
    };
  }

  // The reader has every event, or was told that something is missing.
  bool has_all(const State& s) const {
    for (int x = 0; x < o.sources; x++) {
      if (s.emitted[x] < o.events) return false;
      if (o.how != LIVE_ONLY && s.seen[x] != o.events && !s.gap[x]) return false;
    }
    if (o.how != LIVE_ONLY) return true;
    for (int k = 0; k < s.entries; k++)
      if (less(s.at_epoch, s.at_seq, s.entry[k].epoch, s.entry[k].seq)) return false;
    return s.tail_epoch > 0 && !less(s.tail_epoch, s.tail_seq, s.at_epoch, s.at_seq);
  }
};
