"""What an event says beyond its kind and step, in few words."""

from nsa.observe.events import EventKind, RunEvent
from nsa.observe.view.formatting import as_float, number, plain


def told(event: RunEvent) -> str:
    details = event.details
    if event.kind == EventKind.EVALUATION:
        return f"held-out loss {number(as_float(details.get('val_loss')))}"
    if event.kind == EventKind.LOST_STEPS:
        return f"{details.get('steps', '?')} steps to do again"
    if event.kind in (EventKind.START, EventKind.RESTART):
        origin = str(details.get("origin") or "").rpartition("/")[2]
        return plain(f"{details.get('world', '?')} rank(s){' from ' + origin if origin else ''}")
    if condition := details.get("condition"):
        over = "over" if details.get("over") else details.get("message") or details.get("reason") or ""
        return plain(f"{condition}: {over}", 200)
    for name in ("reason", "error", "problem", "why", "message"):
        if details.get(name):
            return plain(details[name], 200)
    return ""
