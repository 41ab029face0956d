for (const button of document.querySelectorAll("button.copy")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const command = button.previousElementSibling;
    try {
      await navigator.clipboard.writeText(command.textContent);
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(command);
      button.textContent = "selected";
    }
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
}
// On paper, every table is open.
addEventListener("beforeprint", () => { for (const each of document.querySelectorAll("details")) each.open = true; });
// On a phone, rows become cards, in which every number needs its heading.
for (const table of document.querySelectorAll("table.data")) {
  const headings = [...table.tHead.rows[0].cells].map(each => each.textContent.trim());
  for (const row of table.tBodies[0].rows)
    [...row.cells].forEach((each, place) => { each.dataset.of = headings[place]; });
  table.classList.add("cards");
}
// The contents show where the reader is.
const links = new Map([...document.querySelectorAll("nav a")].map(each => [each.hash.slice(1), each]));
const seen = new IntersectionObserver(entries => {
  for (const entry of entries.filter(each => each.isIntersecting)) {
    for (const link of links.values()) link.removeAttribute("aria-current");
    const link = links.get(entry.target.id);
    link.setAttribute("aria-current", "true");
    const list = link.closest("ol");
    if (list.scrollWidth > list.clientWidth) list.scrollTo({ left: link.offsetLeft - list.offsetLeft - 24 });
  }
}, { rootMargin: "-15% 0px -75% 0px" });
for (const name of links.keys()) seen.observe(document.getElementById(name));
